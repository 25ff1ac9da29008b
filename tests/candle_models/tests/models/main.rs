//! Unchanged model files of candle-transformers, trained through candle-ddp-nn.
mod audio;
mod autocast;
mod check;
mod decoders;
mod encoders;
mod experts;
mod golden;
mod lora;
mod state_space;
mod vision;
mod vision_transformers;
