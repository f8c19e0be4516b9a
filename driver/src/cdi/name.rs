//! The names that CDI allows.

/// CDI has no limit; with this one a name, and a file named after it, fit every file system.
const LONGEST: usize = 200;
/// The longest class.
const LONGEST_CLASS: usize = 63;

/// A name that CDI does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a valid CDI {what}: use {rule}")]
pub struct NameError {
    /// The name.
    name: String,
    /// The kind of name.
    what: &'static str,
    /// The rule for it.
    rule: &'static str,
}

/// Checks a device's name.
pub(super) fn check(name: &str) -> Result<(), NameError> {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
    if name.len() <= LONGEST && framed(name, |first| first.is_ascii_alphanumeric(), inner) {
        return Ok(());
    }
    Err(NameError {
        name: name.to_owned(),
        what: "device name",
        rule: "1 to 200 letters, digits, '_', '-', '.' or ':', a letter or digit at both ends",
    })
}

/// Checks a class.
pub(super) fn check_class(class: &str) -> Result<(), NameError> {
    // A '.' is also allowed, but needs a later version of CDI.
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    if class.len() <= LONGEST_CLASS && framed(class, |first| first.is_ascii_alphabetic(), inner) {
        return Ok(());
    }
    Err(NameError {
        name: class.to_owned(),
        what: "class",
        rule: "1 to 63 letters, digits, '_' or '-', a letter first and a letter or digit last",
    })
}

fn framed(name: &str, first: impl Fn(u8) -> bool, inner: impl Fn(u8) -> bool) -> bool {
    let bytes = name.as_bytes();
    bytes.first().is_some_and(|byte| first(*byte))
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.iter().all(|byte| inner(*byte))
}
