//! Readers of files, the model, and whole runs on ranks that are threads.
mod files;
mod model;
mod parquet;
mod resume;
mod tokens;
