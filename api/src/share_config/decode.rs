//! A strict reader of JSON objects with paths in its errors.
//!
//! serde's own errors name a line and a column, but the API server gives parameters as a tree
//! without text. Here every error contains the field's path.

use serde_json::{Map, Value};

/// Why parameters were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The parameters, or a nested field, are not an object.
    #[error("{path} is {found}, must be an object")]
    NotAnObject {
        /// The field's path.
        path: String,
        /// The JSON type of the value.
        found: &'static str,
    },
    /// A required field is missing.
    #[error("{path} is missing, must be {expected:?}")]
    Missing {
        /// The field's path.
        path: String,
        /// The only valid value.
        expected: &'static str,
    },
    /// The apiVersion or kind is not the expected one.
    #[error("{path} is {found:?}, must be {expected:?}")]
    Foreign {
        /// The field's path.
        path: String,
        /// The value.
        found: String,
        /// The only valid value.
        expected: &'static str,
    },
    /// A field that does not exist.
    #[error("{path} is unknown: the fields here are {}", known.join(", "))]
    UnknownField {
        /// The field's path.
        path: String,
        /// The fields that the object can have.
        known: &'static [&'static str],
    },
    /// A field of the wrong JSON type.
    #[error("{path} is {found}, must be {expected}")]
    WrongType {
        /// The field's path.
        path: String,
        /// The JSON type of the value.
        found: &'static str,
        /// The valid type.
        expected: &'static str,
    },
    /// A value that is not allowed.
    #[error("{path} is {found:?}, must be one of {}", allowed.join(", "))]
    UnknownWord {
        /// The field's path.
        path: String,
        /// The value.
        found: String,
        /// The valid values.
        allowed: Vec<&'static str>,
    },
}

/// An object and its path.
pub(super) struct Object<'a> {
    path: String,
    fields: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    /// The outermost object. The caller must check its fields with [`Object::only`].
    pub(super) fn root(value: &'a Value) -> Result<Self, DecodeError> {
        Self::at(String::new(), value)
    }

    fn at(path: String, value: &'a Value) -> Result<Self, DecodeError> {
        match value {
            Value::Object(fields) => Ok(Self { path, fields }),
            other => Err(DecodeError::NotAnObject {
                path: if path.is_empty() {
                    "parameters".to_owned()
                } else {
                    path
                },
                found: type_of(other),
            }),
        }
    }

    /// Returns an error if there is a field that is not in `known`.
    pub(super) fn only(self, known: &'static [&'static str]) -> Result<Self, DecodeError> {
        match self
            .fields
            .keys()
            .find(|name| !known.contains(&name.as_str()))
        {
            Some(unknown) => Err(DecodeError::UnknownField {
                path: self.path_to(unknown),
                known,
            }),
            None => Ok(self),
        }
    }

    fn path_to(&self, field: &str) -> String {
        if self.path.is_empty() {
            field.to_owned()
        } else {
            format!("{}.{field}", self.path)
        }
    }

    /// A field's value; `null` counts as missing, as everywhere in Kubernetes.
    fn value(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    fn text(&self, field: &str) -> Result<Option<&'a str>, DecodeError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(DecodeError::WrongType {
                path: self.path_to(field),
                found: type_of(other),
                expected: "a string",
            }),
        }
    }

    /// A required field with only one allowed value.
    pub(super) fn constant(&self, field: &str, expected: &'static str) -> Result<(), DecodeError> {
        match self.text(field)? {
            Some(found) if found == expected => Ok(()),
            Some(found) => Err(DecodeError::Foreign {
                path: self.path_to(field),
                found: found.to_owned(),
                expected,
            }),
            None => Err(DecodeError::Missing {
                path: self.path_to(field),
                expected,
            }),
        }
    }

    /// A nested object.
    pub(super) fn object(
        &self,
        field: &str,
        known: &'static [&'static str],
    ) -> Result<Option<Self>, DecodeError> {
        self.value(field)
            .map(|value| Self::at(self.path_to(field), value)?.only(known))
            .transpose()
    }

    /// A field with one of several allowed values.
    pub(super) fn word<T: Copy>(
        &self,
        field: &str,
        words: &[(&'static str, T)],
    ) -> Result<Option<T>, DecodeError> {
        let Some(found) = self.text(field)? else {
            return Ok(None);
        };
        match words.iter().find(|(word, _)| *word == found) {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => Err(DecodeError::UnknownWord {
                path: self.path_to(field),
                found: found.to_owned(),
                allowed: words.iter().map(|(word, _)| *word).collect(),
            }),
        }
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
