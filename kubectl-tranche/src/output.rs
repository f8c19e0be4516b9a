//! Shows a command's value: as a table, as a wider one, as JSON or as YAML.
//!
//! Colours only repeat what the words say. They are left out where standard output is not a terminal or NO_COLOR is set.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use anstyle::{AnsiColor, Style};
use comfy_table::{ContentArrangement, Table as Layout, presets};
use serde::Serialize;
use tranche_api::Quantity;

/// How values are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// For people, with more columns.
    Wide,
    /// For programs.
    Json,
    /// For programs.
    Yaml,
}

/// The meaning of a line's colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// No meaning.
    #[default]
    Plain,
    /// A heading.
    Heading,
    /// All is well.
    Good,
    /// Somebody should look at it.
    Warning,
    /// Something does not work.
    Bad,
    /// Less important.
    Faint,
}

impl Tone {
    const fn style(self) -> Style {
        let style = Style::new();
        match self {
            Self::Plain => style,
            Self::Heading => style.bold(),
            Self::Good => style.fg_color(Some(anstyle::Color::Ansi(AnsiColor::Green))),
            Self::Warning => style.fg_color(Some(anstyle::Color::Ansi(AnsiColor::Yellow))),
            Self::Bad => style.fg_color(Some(anstyle::Color::Ansi(AnsiColor::Red))),
            Self::Faint => style.dimmed(),
        }
    }
}

/// Rows under a header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    header: Vec<&'static str>,
    rows: Vec<(Tone, Vec<String>)>,
}

impl Table {
    /// A table without rows. The header is in upper case, as in kubectl.
    #[must_use]
    pub fn new(header: &[&'static str]) -> Self {
        Self {
            header: header.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row, with a cell for each column.
    pub fn row(&mut self, tone: Tone, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.header.len());
        self.rows.push((tone, cells));
    }

    /// Whether there are no rows.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn lines(&self) -> Vec<(Tone, String)> {
        let mut layout = Layout::new();
        layout
            .load_style(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled)
            .set_header(self.header.clone());
        for (_, cells) in &self.rows {
            // An empty cell would look like a missing one.
            let cells = cells
                .iter()
                .map(|cell| if cell.is_empty() { "-" } else { cell.as_str() });
            layout.add_row(cells);
        }
        for column in layout.column_iter_mut() {
            column.set_padding((0, 3));
        }
        let tones = [Tone::Heading]
            .into_iter()
            .chain(self.rows.iter().map(|(tone, _)| *tone));
        let lines = layout.lines().map(|line| line.trim_end().to_owned());
        tones.zip(lines).collect()
    }
}

/// A part of what a command shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// A table.
    Table(Table),
    /// A line.
    Line(Tone, String),
}

impl Block {
    /// A line without a colour.
    #[must_use]
    pub fn plain(text: impl Into<String>) -> Self {
        Self::Line(Tone::Plain, text.into())
    }
}

/// A value that a command shows. Its serialization is the JSON and the YAML.
pub trait View: Serialize {
    /// The blocks for people; with more columns if `is_wide`.
    fn blocks(&self, is_wide: bool) -> Vec<Block>;
}

/// A value that cannot be written as JSON or YAML.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the result as {format}: {problem}")]
pub struct FormatError {
    format: &'static str,
    problem: String,
}

/// The text of a value, with colours. [`print`] removes the colours where they do not belong.
pub fn text(value: &impl View, format: Format) -> Result<String, FormatError> {
    let failed = |format, problem: String| FormatError { format, problem };
    match format {
        Format::Table => Ok(lines(&value.blocks(false))),
        Format::Wide => Ok(lines(&value.blocks(true))),
        Format::Json => serde_json::to_string_pretty(value)
            .map(|text| text + "\n")
            .map_err(|error| failed("JSON", error.to_string())),
        Format::Yaml => {
            serde_saphyr::to_string(value).map_err(|error| failed("YAML", error.to_string()))
        }
    }
}

/// The lines of blocks, with colours.
#[must_use]
pub fn lines(blocks: &[Block]) -> String {
    let mut text = String::new();
    for block in blocks {
        let lines = match block {
            Block::Table(table) => table.lines(),
            Block::Line(tone, line) => vec![(*tone, line.clone())],
        };
        for (tone, line) in lines {
            let style = tone.style();
            // Writing to a String does not fail.
            let _ = writeln!(text, "{style}{line}{style:#}");
        }
    }
    text
}

/// Writes to standard output. A reader that has gone, such as `| head`, is no error.
pub fn print(text: &str) -> io::Result<()> {
    let written = anstream::stdout().write_all(text.as_bytes());
    written
        .and_then(|()| anstream::stdout().flush())
        .or_else(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(error),
        })
}

/// Writes a line for people to standard error.
pub fn note(tone: Tone, text: &str) {
    let style = tone.style();
    anstream::eprintln!("{style}{text}{style:#}");
}

/// Bytes as people write them in a claim: `20Gi`, `78960Mi`.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    Quantity::from_bytes(bytes).to_string()
}

/// Seconds for people: `45s`, `12m 3s`, `3h 20m`.
#[must_use]
pub fn span(seconds: u64) -> String {
    let whole = if seconds < 3600 {
        seconds
    } else {
        seconds / 60 * 60
    };
    let signed = i64::try_from(whole).unwrap_or(i64::MAX);
    format!("{:#}", jiff::SignedDuration::from_secs(signed))
}

/// A value, or `-`.
#[must_use]
pub fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Sample {
        name: &'static str,
    }

    impl View for Sample {
        fn blocks(&self, is_wide: bool) -> Vec<Block> {
            let mut table = Table::new(&["NAME", "NOTE"]);
            table.row(Tone::Bad, vec![self.name.to_owned(), String::new()]);
            table.row(
                Tone::Plain,
                vec!["x".to_owned(), "wide".repeat(usize::from(is_wide))],
            );
            vec![Block::Table(table)]
        }
    }

    #[test]
    fn a_table_has_no_borders_and_optional_colours() {
        let text = text(&Sample { name: "ångström" }, Format::Wide).unwrap();
        assert!(text.contains("\u{1b}[31m"), "{text:?}");
        let plain = anstream::adapter::strip_str(&text).to_string();
        assert_eq!(plain, "NAME       NOTE\nångström   -\nx          wide\n");
    }

    #[test]
    fn json_and_yaml_are_the_value() {
        let sample = Sample { name: "a" };
        assert_eq!(
            text(&sample, Format::Json).unwrap(),
            "{\n  \"name\": \"a\"\n}\n"
        );
        assert_eq!(text(&sample, Format::Yaml).unwrap(), "name: a\n");
    }
}
