//! Shows a result repeatedly: on a terminal in its second screen, otherwise one result after the other.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use crate::output;

/// Enters the terminal's second screen and hides the cursor. The first screen returns afterwards.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Moves to the first cell.
const HOME: &str = "\x1b[H";
const TO_END_OF_LINE: &str = "\x1b[K";
const TO_END_OF_SCREEN: &str = "\x1b[J";

/// Lines and columns where the terminal does not report its size.
const USUAL: (u16, u16) = (24, 80);

/// The terminal's second screen, until it is dropped.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Self> {
        io::stdout().write_all(ENTER.as_bytes())?;
        Ok(Self)
    }

    fn draw(text: &str) -> io::Result<()> {
        let (rows, columns) = size();
        let mut out = anstream::stdout();
        out.write_all(framed(text, rows.into(), columns.into()).as_bytes())?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal is gone, nobody can read an error.
        let _ = io::stdout().write_all(LEAVE.as_bytes());
        let _ = io::stdout().flush();
    }
}

fn size() -> (u16, u16) {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout());
    match size {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => USUAL,
    }
}

/// The text as the whole content of a screen: what does not fit is cut off.
fn framed(text: &str, rows: usize, columns: usize) -> String {
    let mut framed = String::from(HOME);
    let lines: Vec<&str> = text.lines().collect();
    let shown = if lines.len() > rows {
        rows - 1
    } else {
        lines.len()
    };
    for line in &lines[..shown] {
        framed.push_str(&cut(line, columns));
        framed.push_str(TO_END_OF_LINE);
        framed.push_str("\r\n");
    }
    if shown < lines.len() {
        let more = format!("… {} more lines", lines.len() - shown);
        framed.push_str(&more);
    } else if framed.ends_with("\r\n") {
        // A line feed in the last row would move all lines up.
        framed.truncate(framed.len() - 2);
    }
    framed.push_str(TO_END_OF_SCREEN);
    framed
}

/// The first characters of a line; escape sequences do not count.
fn cut(line: &str, columns: usize) -> String {
    let mut kept = String::new();
    let (mut width, mut in_escape) = (0, false);
    for c in line.chars() {
        in_escape |= c == '\x1b';
        if !in_escape {
            width += 1;
        }
        if width <= columns || in_escape {
            kept.push(c);
        }
        in_escape &= !c.is_ascii_alphabetic();
    }
    kept
}

/// Shows the result of `read` every `interval`, until Ctrl-C or until `read` fails.
pub(crate) async fn watch<E: From<io::Error>>(
    interval: Duration,
    mut read: impl AsyncFnMut() -> Result<String, E>,
) -> Result<(), E> {
    let stop = tokio::signal::ctrl_c();
    tokio::pin!(stop);
    let screen = if io::stdout().is_terminal() {
        Some(Screen::enter()?)
    } else {
        None
    };
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = &mut stop => return Ok(()),
            _ = ticks.tick() => {}
        }
        let text = tokio::select! {
            _ = &mut stop => return Ok(()),
            text = read() => text?,
        };
        match screen {
            Some(_) => Screen::draw(&text)?,
            None => output::print(&format!("{text}\n"))?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_shows_what_fits_and_says_what_does_not() {
        let framed = framed("one\ntwo\nthree", 2, 3);
        assert_eq!(framed, "\x1b[Hone\x1b[K\r\n… 2 more lines\x1b[J");
        let framed = super::framed("one\nthree", 2, 3);
        assert_eq!(framed, "\x1b[Hone\x1b[K\r\nthr\x1b[K\x1b[J");
    }

    #[test]
    fn colours_take_no_place() {
        assert_eq!(cut("\x1b[31mabcd\x1b[0m", 2), "\x1b[31mab\x1b[0m");
    }
}
