//! Ranks as processes: under the real launcher, and killed.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod allreduce;
#[path = "../common/bad_batches.rs"]
mod bad_batches_ranks;
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
#[path = "../common/elastic_ranks.rs"]
mod elastic_ranks;
mod elastic_stop;
mod elastic_zero;
#[path = "../common/elastic_zero.rs"]
mod elastic_zero_ranks;
mod faults;
mod image_programs;
mod load;
mod non_finite;
mod objects;
#[path = "../common/programs.rs"]
mod programs;
mod sharded_save;
mod slow_rank;
mod small_data;
mod status;
mod stop;
mod verdict;
mod virtual_models;
mod virtual_ranks;
#[path = "../common/virtual_ranks.rs"]
mod virtual_run;
mod with_grad;
mod word_lm;
