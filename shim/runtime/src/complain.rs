//! One line on stderr, once per process, when a share's pages are invalid.

use core::sync::atomic::{AtomicBool, Ordering};

use tranche_shim_core::MessagePart;

use crate::sys;

/// The GPU is not used; stderr says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Refused;

static SAID: AtomicBool = AtomicBool::new(false);

const LINE: usize = 640;

/// Writes `tranche: ` and the parts to stderr, the first time that it is called in this process.
#[cold]
#[inline(never)]
pub fn refuse(parts: &[&[MessagePart<'_>]]) -> Refused {
    if SAID.swap(true, Ordering::Relaxed) {
        return Refused;
    }
    let mut line = Line {
        bytes: [0; LINE],
        len: 0,
    };
    line.text(b"tranche: ");
    for part in parts.iter().copied().flatten() {
        match *part {
            MessagePart::Text(text) => line.text(text.as_bytes()),
            MessagePart::Number(number) => line.number(number),
        }
    }
    line.text(b"\n");
    sys::write_stderr(line.bytes.get(..line.len).unwrap_or(&[]));
    Refused
}

struct Line {
    bytes: [u8; LINE],
    len: usize,
}

impl Line {
    /// A line that is too long is truncated.
    fn text(&mut self, text: &[u8]) {
        for &byte in text {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = byte;
                self.len += 1;
            }
        }
    }

    fn number(&mut self, mut number: u64) {
        let mut digits = [0; 20];
        for at in (0..digits.len()).rev() {
            let digit = (number % 10) as u8;
            digits[at] = b'0' + digit;
            number /= 10;
            if number == 0 {
                self.text(digits.get(at..).unwrap_or(&[]));
                return;
            }
        }
    }
}
