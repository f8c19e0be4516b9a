//! One line on stderr, once per process, when a share is not as it must be.

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::sys;

static SAID: AtomicBool = AtomicBool::new(false);

/// Writes `tranche: <what>` to stderr, the first time it is called in this process.
pub fn once(what: fmt::Arguments<'_>) {
    if SAID.swap(true, Ordering::Relaxed) {
        return;
    }
    let mut line = Line {
        text: [0; LINE],
        len: 0,
    };
    // A line that is too long is cut off.
    let _ = write!(line, "tranche: {what}");
    line.text[line.len.min(LINE - 1)] = b'\n';
    sys::write_stderr(&line.text[..line.len.min(LINE - 1) + 1]);
}

const LINE: usize = 512;

struct Line {
    text: [u8; LINE],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            let Some(place) = self.text.get_mut(self.len) else {
                return Err(fmt::Error);
            };
            *place = byte;
            self.len += 1;
        }
        Ok(())
    }
}
