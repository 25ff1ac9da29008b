//! Models, gradients, optimizers, data and checkpoints, with ranks as threads.
#![allow(clippy::unwrap_used)] // a failed test may panic
#[path = "../common/mod.rs"]
mod common;
#[path = "../golden/model.rs"]
mod model;
#[path = "../common/programs.rs"]
mod programs;
#[path = "../common/weights.rs"]
mod weights;

mod accumulate;
mod adapters;
mod advice;
mod amp;
mod amp_grad_scaler;
mod amp_known;
mod amp_scaled;
mod answers;
mod autocast;
mod autocast_options;
mod backward_and_step;
mod bad_batches;
#[path = "../common/bad_batches.rs"]
mod bad_batches_ranks;
mod checkpoint;
mod checkpoint_damage;
mod checkpoint_file;
mod checkpoint_finite;
mod checkpoint_pickle;
mod checkpointer;
mod checkpointer_ranks;
mod clip_ranks;
mod comm_hooks;
mod comm_hooks_feedback;
mod data_parallel;
mod ddp;
mod ddp_golden;
mod debug;
mod early_batches;
mod empty;
mod evaluation;
mod failed_pass;
mod freezing;
mod goes_with;
mod golden_folders;
mod golden_model;
mod gradient_penalty;
mod image_programs;
mod init_seed;
mod join;
mod loader;
mod loader_indices;
mod lora;
mod lora_golden;
mod messages;
mod metrics;
mod nn_checkpoint;
mod nn_dropout;
mod nn_sync_batch_norm;
mod no_grad;
mod non_finite;
mod optim_average;
mod optim_choice;
mod optim_golden;
mod optim_muon;
mod optim_own;
mod optim_state;
mod orders;
mod pretrained;
mod quick_start;
mod replica_check;
mod resume;
mod schedules;
mod several_models;
mod sharded_blocks;
mod sharded_files;
mod small_data;
mod stale_graph;
mod stop;
mod tar_shards;
mod thawing;
mod uneven_blocks;
mod unused;
mod update_bn;
mod virtual_ranks;
mod virtual_ranks_passes;
#[path = "../common/virtual_ranks.rs"]
mod virtual_run;
mod vision_errors;
mod vision_models;
mod weighted;
mod with_grad;
mod without_samples;
mod zero;
mod zero_and_plain;
mod zero_buckets;
mod zero_muon;
