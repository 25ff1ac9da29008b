//! Images, transforms, datasets and models against Pillow and torchvision, and what is refused.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod errors;
mod models;
mod values;
