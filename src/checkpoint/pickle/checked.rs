/// What a check found wrong, without the file's name.
pub(super) type Checked<T> = std::result::Result<T, String>;
