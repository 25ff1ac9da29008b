//! The learning rates of the epochs.
use candle_ddp::Result;
use candle_ddp::optim::{ParamsCosineAnnealingLr, ParamsMultiStepLr, Schedule};
use clap::ValueEnum;

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum ScheduleKind {
    /// Half a cosine, down to 0.
    Cosine,
    /// A tenth after half of the epochs, and again after three quarters.
    MultiStep,
}

/// The schedule that was chosen.
pub(crate) enum ParamsEpochs {
    Cosine(ParamsCosineAnnealingLr),
    MultiStep(ParamsMultiStepLr),
}

impl ScheduleKind {
    pub(crate) fn over(self, epochs: u64) -> ParamsEpochs {
        match self {
            Self::Cosine => ParamsEpochs::Cosine(ParamsCosineAnnealingLr { t_max: epochs, eta_min: 0. }),
            Self::MultiStep => {
                let milestones = vec![epochs.div_ceil(2), (3 * epochs).div_ceil(4)];
                ParamsEpochs::MultiStep(ParamsMultiStepLr { milestones, gamma: 0.1 })
            }
        }
    }
}

impl Schedule for ParamsEpochs {
    fn name(&self) -> &'static str {
        "ParamsEpochs"
    }

    fn check(&self) -> Result<()> {
        match self {
            Self::Cosine(params) => params.check(),
            Self::MultiStep(params) => params.check(),
        }
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        match self {
            Self::Cosine(params) => params.learning_rate(base, step),
            Self::MultiStep(params) => params.learning_rate(base, step),
        }
    }
}
