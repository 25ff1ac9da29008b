//! Finds the source of candle-transformers, as cargo has fetched it, and writes the modules that `src/lib.rs` includes: its
//! files, unchanged, compiled as part of this package, where `candle_nn` is candle-ddp-nn.
use std::{env, error::Error, fs, path::Path, process::Command};

/// The model files that the tests train, and those that they use.
const MODELS: &str = "beit bert bigcode blip blip_text clip convnext dac debertav2 deepseek2 dinov2 dinov2reg4 distilbert \
    efficientnet efficientvit encodec eva2 falcon fastvit gemma gemma2 gemma3 glm4 glm4_new granite granitemoehybrid helium hiera \
    jina_bert llama mamba mamba2 marian mistral mixtral mobilenetv4 mobileone modernbert nomic_bert olmo olmo2 \
    phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe recurrent_gemma repvgg resnet rwkv_v5 rwkv_v6 segformer siglip smol snac \
    stable_lm starcoder2 t5 trocr vgg vit whisper with_tracing xlm_roberta";

/// The files that these use.
const HELPERS: &str = "fused_moe quantized_nn quantized_var_builder utils";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=Cargo.lock");
    // `cargo metadata` fetches the packages of all platforms, and so candle-transformers, which no platform needs.
    let output = Command::new(env::var("CARGO")?)
        .args(["metadata", "--locked", "--format-version", "1"])
        .current_dir(env::var("CARGO_MANIFEST_DIR")?)
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let manifest = metadata["packages"]
        .as_array()
        .and_then(|packages| packages.iter().find(|package| package["name"] == "candle-transformers"))
        .and_then(|package| package["manifest_path"].as_str())
        .ok_or("candle-transformers is not among the packages of Cargo.lock")?;
    let source = Path::new(manifest).with_file_name("src");
    let modules =
        format!("{}pub mod models {{\n{}}}\n", modules(&source, HELPERS)?, modules(&source.join("models"), MODELS)?);
    fs::write(Path::new(&env::var("OUT_DIR")?).join("modules.rs"), modules)?;
    Ok(())
}

/// A declaration for each of the modules in `folder`, which are files or folders.
fn modules(folder: &Path, names: &str) -> Result<String, Box<dyn Error>> {
    let mut declarations = String::new();
    for name in names.split_whitespace() {
        let file = folder.join(name).with_extension("rs");
        let file = if file.exists() { file } else { folder.join(name).join("mod.rs") };
        if !file.exists() {
            return Err(format!("candle-transformers has no module {name}: change the lists in build.rs").into());
        }
        declarations += &format!("#[allow(warnings, clippy::all)]\n#[path = {file:?}]\npub mod {name};\n");
    }
    Ok(declarations)
}
