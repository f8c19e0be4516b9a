//! Takes secrets out of objects and texts.

use serde_json::Value;

/// The text that replaces a secret.
pub(super) const REDACTED: &str = "(redacted)";

/// Keys of objects whose values may be secrets or copies of secrets.
const SECRET_KEYS: [&str; 8] = [
    // Environment variables, their sources, and command lines.
    "env",
    "envFrom",
    "args",
    "command",
    // The whole applied object, with its environment.
    "kubectl.kubernetes.io/last-applied-configuration",
    "managedFields",
    "data",
    "stringData",
];

/// The least length of a word that may be a token.
const TOKEN: usize = 20;

/// Words before a secret, in lower case; `:` or `=` may stand between.
const INTRODUCTIONS: [&str; 7] = [
    "bearer",
    "token",
    "password",
    "passwd",
    "secret",
    "apikey",
    "authorization",
];

/// Takes secret values out of an object. The `data` of a ResourceClaim's devices stays: the node wrote it.
pub(super) fn object(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let is_device = fields.contains_key("driver") && fields.contains_key("pool");
            fields.retain(|key, _| key != "managedFields");
            for (key, value) in fields.iter_mut() {
                let is_secret =
                    SECRET_KEYS.contains(&key.as_str()) && !(is_device && key == "data");
                if !is_secret {
                    object(value);
                } else if key == "env" {
                    names(value);
                } else {
                    *value = Value::from(REDACTED);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(object),
        _ => {}
    }
}

/// Takes out the values of environment variables and keeps the names.
fn names(value: &mut Value) {
    if let Value::Array(variables) = value {
        for variable in variables.iter_mut().filter_map(Value::as_object_mut) {
            variable.retain(|key, _| key == "name");
        }
    } else {
        *value = Value::from(REDACTED);
    }
}

/// Takes out words that look like a token, and words after an introduction such as `password`.
pub(super) fn text(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut is_introduced = false;
    let mut rest = text;
    while !rest.is_empty() {
        let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        if is_token(word) || is_introduced && word.len() >= 4 && !is_exactly_introduction(word) {
            kept.push_str(REDACTED);
            is_introduced = false;
        } else {
            kept.push_str(word);
            is_introduced = is_introduction(word) || is_introduced && word.is_empty();
        }
        // The characters between words; a new line ends an introduction.
        let between = after.find(is_word).unwrap_or(after.len());
        let (separator, next) = after.split_at(between);
        kept.push_str(separator);
        let binds = |c: char| matches!(c, ':' | '=' | ' ' | '"' | '\'' | '\\' | '\t');
        is_introduced &= separator.chars().all(binds);
        rest = next;
    }
    kept
}

/// Whether tokens have the character: base64, and the dots between the parts of a JSON Web Token.
fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+' | '/')
}

fn is_introduction(word: &str) -> bool {
    let word = word.to_ascii_lowercase().replace(['-', '_'], "");
    INTRODUCTIONS.iter().any(|it| word.ends_with(it))
}

/// Whether the whole word is an introduction, as in `Authorization: Bearer …`. A secret may end in such a word.
fn is_exactly_introduction(word: &str) -> bool {
    INTRODUCTIONS.contains(&word.to_ascii_lowercase().as_str())
}

/// Whether the word is a JSON Web Token or begins as another well-known kind of token does.
fn is_token(word: &str) -> bool {
    let begins = [
        "eyJ", "ghp_", "gho_", "glpat-", "hf_", "sk-", "xoxb-", "AKIA", "nvapi-",
    ];
    word.len() >= TOKEN && begins.iter().any(|it| word.starts_with(it))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_and_what_introduces_them_are_told_from_other_words() {
        for (from, to) in [
            (
                "Authorization: Bearer abcdef123456",
                "Authorization: Bearer (redacted)",
            ),
            ("secret: my-own-secret", "secret: (redacted)"),
            ("token=abcdef and more", "token=(redacted) and more"),
            (r#"{"password":"hunter22"}"#, r#"{"password":"(redacted)"}"#),
            ("api_key: 0123456789", "api_key: (redacted)"),
            (
                "x eyJhbGciOiJSUzI1NiIsImtpZCI6.e30.c2ln y",
                "x (redacted) y",
            ),
            ("the token is not valid", "the token is not valid"),
            (
                "GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d",
                "GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d",
            ),
            ("token\nnext line", "token\nnext line"),
        ] {
            assert_eq!(text(from), to);
        }
    }

    #[test]
    fn names_of_variables_stay_and_values_go() {
        let mut value =
            json!({"env": [{"name": "KEY", "value": "hunter2"}, {"name": "B", "valueFrom": {}}]});
        object(&mut value);
        assert_eq!(value, json!({"env": [{"name": "KEY"}, {"name": "B"}]}));
        let mut value = json!({"driver": "d", "pool": "p", "data": {"gpuUUID": "GPU-1"}});
        object(&mut value);
        assert_eq!(value["data"]["gpuUUID"], "GPU-1");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_and_tokens_never_stay(before in ".{0,40}", after in "\\PC{0,40}") {
            let token = "eyJhbGciOiJSUzI1NiJ9.cGxhbnRlZA.c2lnbmF0dXJl";
            let redacted = text(&format!("{before} {token} {after}"));
            prop_assert!(!redacted.contains(token));
        }
    }
}
