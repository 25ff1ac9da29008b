/// The result of a check. The error says what is wrong, without the file's name.
pub(super) type Checked<T> = std::result::Result<T, String>;
