/// The result of a check. The error says what is wrong, without the file's name.
pub(crate) type Checked<T> = Result<T, String>;
