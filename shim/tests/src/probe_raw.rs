//! Calls any function of the driver by name, with a buffer of words for its arguments and results.
//!
//! `call NAME ARGUMENT…`: an argument is a number, `&N` is the address of word N, `$N` its value.
//! `set N NUMBER…` writes words from N on, `words N COUNT` reads them. `address-of N M` writes the address of word M to word N.

use std::ffi::c_void;
use std::sync::Mutex;

const WORDS: usize = 1024;

type Call = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64) -> u32;

static PAD: Mutex<[u64; WORDS]> = Mutex::new([0; WORDS]);

/// Executes one of the commands above.
pub fn answer_to(words: &[&str], find: impl Fn(&str) -> *mut c_void) -> Option<String> {
    let mut pad = PAD.lock().unwrap();
    let number = |word: &str| -> usize { word.parse().unwrap() };
    match *words {
        ["set", at, ref values @ ..] => {
            for (nth, value) in values.iter().enumerate() {
                pad[number(at) + nth] = value.parse().unwrap();
            }
            Some("0".into())
        }
        ["address-of", at, of] => {
            pad[number(at)] = (&raw const pad[number(of)]) as u64;
            Some("0".into())
        }
        ["words", at, count] => {
            let found: Vec<_> = pad[number(at)..][..number(count)]
                .iter()
                .map(u64::to_string)
                .collect();
            Some(format!("0 {}", found.join(" ")))
        }
        ["call", name, ref arguments @ ..] => {
            let mut given = [0u64; 8];
            for (place, argument) in given.iter_mut().zip(arguments) {
                *place = if let Some(at) = argument.strip_prefix('&') {
                    (&raw mut pad[number(at)]) as u64
                } else if let Some(at) = argument.strip_prefix('$') {
                    pad[number(at)]
                } else {
                    argument.parse().unwrap()
                };
            }
            let [x0, x1, x2, x3, x4, x5, x6, x7] = given;
            // SAFETY: in this ABI integers and pointers of any width pass in words, and those that a
            // function does not take do no harm. What the words mean is the test's care.
            let code = unsafe {
                std::mem::transmute::<*mut c_void, Call>(find(name))(x0, x1, x2, x3, x4, x5, x6, x7)
            };
            Some(code.to_string())
        }
        _ => None,
    }
}
