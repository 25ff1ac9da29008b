//! The state of a training program.
use candle_ddp::amp::GradScaler;
use candle_ddp::checkpoint::{Parts, StateDict};
use candle_nn::VarMap;

/// What training changes, which is what a checkpoint holds.
pub(crate) struct Training<O, S, L> {
    pub(crate) varmap: VarMap,
    pub(crate) optimizer: O,
    pub(crate) schedule: S,
    pub(crate) scaler: GradScaler,
    pub(crate) loader: L,
}

impl<O: StateDict, S: StateDict, L: StateDict> Parts for Training<O, S, L> {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        let Self { varmap, optimizer, schedule, scaler, loader } = self;
        vec![
            ("model", varmap),
            ("optimizer", optimizer),
            ("schedule", schedule),
            ("scaler", scaler),
            ("loader", loader),
        ]
    }
}
