//! Model files of candle-transformers as its authors wrote them, with `candle_nn` renamed: `build.rs` finds them. `tests/models`
//! trains them.
include!(concat!(env!("OUT_DIR"), "/modules.rs"));
