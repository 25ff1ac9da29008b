//! Ranks as processes: under the real launcher, and killed.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod allreduce;
mod bert_classifier;
mod cause;
mod char_gpt;
mod checkpointer;
#[path = "../common/mod.rs"]
mod common;
mod custom_loop;
mod data;
mod ddp;
mod diagnostics;
mod digits;
mod elastic;
mod elastic_groups;
mod elastic_groups_ranks;
mod elastic_stop;
mod elastic_zero;
mod faults;
mod image_programs;
mod load;
mod non_finite;
mod objects;
mod sharded_save;
mod slow_rank;
mod small_data;
mod status;
mod stop;
mod verdict;
mod virtual_models;
mod virtual_ranks;
mod with_grad;
mod word_lm;
