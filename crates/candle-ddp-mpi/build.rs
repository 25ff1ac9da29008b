//! Compiles `src/constants.c` with the MPI that the crate `mpi` finds.
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=src/constants.c");
    println!("cargo:rerun-if-env-changed=MPICC");
    let library = build_probe_mpi::probe().map_err(|reasons| {
        let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        format!(
            "no MPI was found: install one (libopenmpi-dev or libmpich-dev on Debian), or name its compiler in MPICC: {}",
            reasons.join("; ")
        )
    })?;
    let mut build = cc::Build::new();
    match library.mpicc {
        Some(mpicc) => build.compiler(mpicc),
        None => build.includes(library.include_paths),
    };
    build.file("src/constants.c").try_compile("candle_ddp_mpi_constants")?;
    Ok(())
}
