//! The options of adapters, and the layers that have one.
use super::names;
use candle_core::Result;
use candle_ddp_tensor::Error;

/// Low-rank adapters on linear layers, embeddings and convolutions, as peft's `LoraConfig` describes them: a layer with the frozen
/// weight W computes with W + scaling · B·A, where A and B have the rank `r`. Only A and B are trained.
///
/// [`build`](Self::build) adds them to a model whose code does not know of them. The options have peft's names, meanings and
/// default values.
///
/// ```
/// # use candle_core::{DType, Device, Module, Result, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> Result<()> {
/// use candle_ddp_nn::{LoraConfig, linear};
/// # let pretrained = VarMap::new();
/// # let base = VarBuilder::from_varmap(&pretrained, DType::F32, &Device::Cpu);
/// # linear(8, 4, base.pp("head"))?;
/// let varmap = VarMap::new(); // gets what is trained: head.lora_A.weight and head.lora_B.weight
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let config = LoraConfig { target_modules: vec!["head".to_string()], ..Default::default() };
/// let model = config.build(base, vb, |vb| linear(8, 4, vb.pp("head")))?;
/// let loss = model.forward(&Tensor::ones((2, 8), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
/// assert_eq!(loss.backward()?.get_ids().count(), 2);
/// # assert_eq!(varmap.all_vars().len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank of the adapters. Default: 8.
    pub r: usize,
    /// The adapters' part is multiplied by `lora_alpha / r`. Default: 8.
    pub lora_alpha: f64,
    /// The probability with which [`Dropout`](crate::Dropout) makes an element of the input of an adapter zero (not of an embedding's).
    /// It acts while gradients are recorded, so an evaluation must run under [`no_grad`](crate::no_grad()). Default: 0.
    pub lora_dropout: f32,
    /// The layers that get adapters. Each pattern is a layer's name, or the end of one that follows a dot: `q_proj` is every layer of that
    /// name. `*` stands for any text. Default: none, which is an error.
    pub target_modules: Vec<String>,
    /// Patterns of layers that get no adapter, although `target_modules` has them. Default: none.
    pub exclude_modules: Vec<String>,
    /// Layers, or groups of layers, that are trained as a whole, such as a new head: all whose names end with one of these, so that `norm`
    /// is also `input_layernorm`. `*` stands for any text. Default: none.
    pub modules_to_save: Vec<String>,
    /// Which biases are trained. Default: none.
    pub bias: LoraBias,
    /// Whether the adapters' part is multiplied by `lora_alpha / √r` instead. Default: false.
    pub use_rslora: bool,
    /// The name of the pretrained model on the Hugging Face Hub, or its folder, which saved options tell peft. Default: none; then a
    /// program must know the model that belongs to the adapter.
    pub base_model_name_or_path: Option<String>,
    /// The task, by a name of peft's `TaskType`, such as `CAUSAL_LM`: saved options tell peft which of its classes the adapted model has.
    /// Default: none, which is a `PeftModel`.
    pub task_type: Option<String>,
}

/// The names of peft's `TaskType`, which accepts no other.
const TASKS: [&str; 6] = ["SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"];

/// Which biases are trained with the adapters of a [`LoraConfig`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoraBias {
    /// No bias.
    #[default]
    None,
    /// All biases of the model.
    All,
    /// The biases of layers that have adapters.
    LoraOnly,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            target_modules: Vec::new(),
            exclude_modules: Vec::new(),
            modules_to_save: Vec::new(),
            bias: LoraBias::None,
            use_rslora: false,
            base_model_name_or_path: None,
            task_type: None,
        }
    }
}

impl LoraConfig {
    /// Whether a variable of this name is trained: those of adapters, those of [`modules_to_save`](Self::modules_to_save), and the
    /// biases that [`bias`](Self::bias) selects. All others are frozen.
    pub fn is_trained(&self, name: &str) -> bool {
        let (module, last) = names::split(name);
        let is_bias = match self.bias {
            LoraBias::None => false,
            LoraBias::All => last == "bias",
            LoraBias::LoraOnly => last == "bias" && self.is_targeted(module),
        };
        is_bias || names::is_adapter(name) || self.is_whole(module)
    }

    /// Whether all of the layer is trained.
    pub(super) fn is_whole(&self, module: &str) -> bool {
        self.modules_to_save.iter().any(|pattern| names::contains(pattern, module))
    }

    /// The factor of the adapters' part.
    pub fn scaling(&self) -> f64 {
        self.lora_alpha / if self.use_rslora { (self.r as f64).sqrt() } else { self.r as f64 }
    }

    pub(super) fn is_targeted(&self, module: &str) -> bool {
        let fits = |patterns: &[String]| patterns.iter().any(|pattern| names::fits(pattern, module));
        fits(&self.target_modules) && !fits(&self.exclude_modules)
    }

    pub(super) fn check(&self) -> Result<()> {
        let invalid = |option, reason: String| Err(Error::invalid(option, reason).into());
        if self.r == 0 {
            return invalid("r", "the rank of LoRA's adapters must be at least 1, not 0".to_string());
        }
        if !self.lora_alpha.is_finite() {
            return invalid("lora_alpha", format!("it must be a finite number, not {}", self.lora_alpha));
        }
        if !(0.0..1.0).contains(&self.lora_dropout) {
            return invalid(
                "lora_dropout",
                format!("it must be at least 0 and less than 1, not {}", self.lora_dropout),
            );
        }
        if self.target_modules.is_empty() {
            return invalid(
                "target_modules",
                "it must have the name of at least one layer, such as q_proj".to_string(),
            );
        }
        if let Some(task) = self.task_type.as_ref().filter(|task| !TASKS.contains(&task.as_str())) {
            return invalid(
                "task_type",
                format!("it must be one of {}, which peft knows, not {task:?}", TASKS.join(", ")),
            );
        }
        Ok(())
    }
}
