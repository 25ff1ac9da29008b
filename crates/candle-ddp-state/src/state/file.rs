//! Files of tensors, which appear complete or not at all.
mod bytes;
mod safetensors;
mod write;

pub use bytes::{Hashed, PartHashes};
pub use candle_ddp_base::file::{
    PreparedFile, Progress, is_temporary, is_temporary_for, lock_leftover, temporary_name,
};
pub(crate) use safetensors::require_all;
pub use safetensors::{Flaw, LONGEST_HEADER, Readable, SafetensorsFile, read_safetensors, read_state, wrong};
pub use write::{NextPart, Part, Values, WriteJob, write_safetensors};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    /// An optimizer's state must be loaded completely.
    #[test]
    fn a_tensor_that_cannot_be_read_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let header = br#"{"b":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"BOOL","shape":[1],"data_offsets":[1,2]}}"#;
        std::fs::write(&file, [&(header.len() as u64).to_le_bytes()[..], header, &[7, 1]].concat()).unwrap();
        match read_safetensors(file.path()) {
            Err(Error::InvalidArgument { argument: "path", reason }) => {
                assert_eq!(reason, format!("{} cannot be read: b: candle has no dtype for I8", file.path().display()));
            }
            other => panic!("{other:?}"),
        }
    }
}
