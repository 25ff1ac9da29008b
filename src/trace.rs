//! A timeline of the training steps, for Perfetto or Chrome's `about:tracing`.
//!
//! Each rank writes one file, `rank<N>.trace.json`, in the [trace event format]. It shows the phases of the training
//! thread and, next to them, the all-reduces. On GPUs, times are measured on the GPU, and each phase of a step waits
//! for the GPU, so a step takes longer than without a trace; a bucket is shown as ready when the host has reached that
//! point. `ddprun merge-traces FOLDER` merges the files of all ranks.
//!
//! A run replaces the files of an earlier one in the same folder; each generation of an elastic run replaces the files
//! of the one before.
//! With the feature `nvtx`, NVIDIA's Nsight Systems shows the same phases, without any file.
//!
//! The calls of a failed run are in the files of the [flight recorder](crate::flight_recorder).
//!
//! [trace event format]: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
use crate::backend::Work;
#[doc(inline)]
pub use candle_ddp_base::trace::merge;
pub(crate) use candle_ddp_base::trace::{Row, Trace};
use std::fmt::{self, Display};

/// The environment variable for the trace folder, used if the options do not set one.
pub(crate) const FOLDER_VARIABLE: &str = "CANDLE_DDP_TRACE";

/// Runs `f`, and shows it as `name` in NVIDIA's tools, with the feature `nvtx`. Without a tool, this costs less than a microsecond.
pub(crate) fn in_nvtx_range<T>(name: &str, f: impl FnOnce() -> T) -> T {
    #[cfg(feature = "nvtx")]
    let _range = nvtx::LocalRange::new(nvtx_text(name));
    #[cfg(not(feature = "nvtx"))]
    let _ = name;
    f()
}

/// Shows a moment there.
pub(crate) fn nvtx_mark(name: fmt::Arguments<'_>) {
    #[cfg(feature = "nvtx")]
    nvtx::mark(nvtx_text(&name.to_string()));
    #[cfg(not(feature = "nvtx"))]
    let _ = name;
}

/// The text without NUL, where one of C would end. The tools take no wide characters from every program.
#[cfg(feature = "nvtx")]
fn nvtx_text(text: &str) -> std::ffi::CString {
    std::ffi::CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// Records a collective, after waiting for its end on a GPU.
pub(crate) fn collective(trace: &Trace, work: &Work, name: impl Display) {
    if work.synchronize().is_ok()
        && let Some((start, end)) = work.span()
    {
        trace.span(Row::Communication, name, start, end);
    }
}
