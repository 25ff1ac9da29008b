//! Readers of files, the model, and whole runs on ranks that are threads.
mod files;
mod model;
mod resume;
mod tokens;
