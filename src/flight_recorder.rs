//! The flight recorder: the last calls of every rank, written to a file when a group fails. See
//! [`candle_ddp_engine::flight_recorder`] for the files.
#[doc(no_inline)]
pub use candle_ddp_engine::flight_recorder::FlightRecorderOptions;
pub(crate) use candle_ddp_engine::flight_recorder::Recording;
