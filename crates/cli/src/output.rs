//! What people and programs see.
//!
//! What lives here: text or JSON on standard output, colours, tables, progress on standard error.
//! What does not: what is said (`commands/`), logs (`logging.rs`).
//! Invariant: no control character of a key, topic or reason reaches a terminal.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use postrider_core::Timestamp;
use serde_json::Value as Json;

use crate::args::{Color, Global};

/// How to speak.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// JSON for programs.
    pub(crate) json: bool,
    color: bool,
    progress: bool,
}

/// A colour with a meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Headings.
    Strong,
    /// All is well.
    Good,
    /// Needs attention.
    Warn,
    /// Failed.
    Bad,
    /// Less important.
    Faint,
}

impl Output {
    /// From the flags and the environment.
    pub(crate) fn new(global: &Global) -> Self {
        let color = match global.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => colors_wanted() && io::stdout().is_terminal(),
        };
        let progress = !global.quiet && io::stderr().is_terminal();
        Self { json: global.json, color: color && !global.json, progress }
    }

    /// Text in a tone, if colours are on.
    pub(crate) fn paint(&self, tone: Tone, text: impl Into<String>) -> String {
        let text = text.into();
        if !self.color {
            return text;
        }
        let code = match tone {
            Tone::Strong => "1",
            Tone::Good => "32",
            Tone::Warn => "33",
            Tone::Bad => "31",
            Tone::Faint => "2",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    /// One line on standard output, at once.
    ///
    /// # Errors
    /// When it can't be written. A reader that went away lets `main` end quietly.
    pub(crate) fn line(&self, text: impl AsRef<str>) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let written = out
            .write_all(text.as_ref().as_bytes())
            .and_then(|()| out.write_all(b"\n"))
            .and_then(|()| out.flush());
        written.map_err(|error| {
            io::Error::new(error.kind(), format!("write to standard output: {error}"))
        })
    }

    /// One JSON document on one line.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub(crate) fn json_line(&self, document: &Json) -> io::Result<()> {
        self.line(document.to_string())
    }

    /// One JSON document, laid out.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub(crate) fn json_document(&self, document: &Json) -> io::Result<()> {
        self.line(format!("{document:#}"))
    }

    /// A table: a heading and rows; the last column is not padded.
    ///
    /// # Errors
    /// As [`line`](Self::line).
    pub(crate) fn table(&self, heading: &[&str], rows: &[Vec<Cell>]) -> io::Result<()> {
        let heading: Vec<Cell> =
            heading.iter().map(|text| Cell::toned(text, Tone::Strong)).collect();
        let lines = || std::iter::once(&heading).chain(rows);
        let columns = lines().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            lines().filter_map(|row| row.get(column)).map(Cell::width).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in lines() {
            let mut line = String::new();
            for (index, (cell, width)) in row.iter().zip(&widths).enumerate() {
                match cell.tone {
                    Some(tone) => line.push_str(&self.paint(tone, cell.text.as_str())),
                    None => line.push_str(&cell.text),
                }
                if index + 1 < row.len() {
                    line.extend(std::iter::repeat_n(' ', width + 2 - cell.width()));
                }
            }
            self.line(line.trim_end())?;
        }
        Ok(())
    }

    /// Progress of a long work on standard error; hidden where nobody looks.
    pub(crate) fn progress(&self, what: &'static str) -> ProgressBar {
        let target =
            if self.progress { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        let style =
            ProgressStyle::with_template("{spinner} {msg}: {human_pos} ({per_sec}, {elapsed})");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        bar.set_message(what);
        if self.progress {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        bar
    }
}

/// One cell of a table.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    text: String,
    tone: Option<Tone>,
}

impl Cell {
    /// Plain text; control characters are escaped.
    pub(crate) fn plain(text: impl AsRef<str>) -> Self {
        Self { text: escape(text.as_ref()).into_owned(), tone: None }
    }

    /// Text in a tone; control characters are escaped.
    pub(crate) fn toned(text: impl AsRef<str>, tone: Tone) -> Self {
        Self { text: escape(text.as_ref()).into_owned(), tone: Some(tone) }
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }

    /// A number.
    pub(crate) fn number(number: u64) -> Self {
        Self { text: number.to_string(), tone: None }
    }
}

/// Whether the environment wants colours (<https://no-color.org>).
pub(crate) fn colors_wanted() -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    !no_color && !dumb
}

/// Whether a person can be asked.
pub(crate) fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Text without control characters and without marks that reverse its direction: each is written
/// as `\u{…}` (or `\n`, `\t`, `\r`), so that it can neither command a terminal nor fool an eye.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    let unsafe_on_screen = |c: char| {
        let marks = ['\u{200e}', '\u{200f}'].contains(&c);
        let directions = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        c.is_control() || marks || directions
    };
    if !text.contains(unsafe_on_screen) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if unsafe_on_screen(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// RFC 3339, in UTC, with milliseconds.
pub(crate) fn time(at: Timestamp) -> String {
    let ms = i64::try_from(at.as_millis()).unwrap_or(i64::MAX);
    match jiff::Timestamp::from_millisecond(ms) {
        Ok(time) => format!("{time:.3}"),
        Err(_) => format!("{ms} ms"),
    }
}

/// A size, for people: two digits or three.
pub(crate) fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut whole, mut tenths, mut unit) = (bytes, 0, 0);
    while whole >= 1024 {
        tenths = whole % 1024 * 10 / 1024;
        whole /= 1024;
        unit += 1;
    }
    match (unit, whole) {
        (1.., 0..10) => format!("{whole}.{tenths} {}", units[unit]),
        _ => format!("{whole} {}", units[unit]),
    }
}

/// A rough length of time for people: `0s`, `340ms`, `12s`, `5m 3s`, `2h 10m`, `3d 4h`.
pub(crate) fn roughly(duration: Duration) -> String {
    let ms = duration.as_millis();
    let seconds = duration.as_secs();
    match seconds {
        0 if ms > 0 => format!("{ms}ms"),
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m {}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h {}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d {}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_unit_that_makes_them_short() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (16 << 20, "16 MiB"),
            (u64::MAX, "15 EiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn control_characters_and_direction_marks_are_escaped() {
        assert_eq!(escape("order-1 ü"), "order-1 ü");
        assert_eq!(escape("a\x1b[31mb\nc"), "a\\u{1b}[31mb\\nc");
        assert_eq!(escape("a\u{9b}b\u{202e}c"), "a\\u{9b}b\\u{202e}c");
    }

    #[test]
    fn times_are_rfc_3339_with_milliseconds() {
        assert_eq!(time(Timestamp::from_millis(1_672_671_845_000)), "2023-01-02T15:04:05.000Z");
        assert_eq!(time(Timestamp::from_millis(u64::MAX)), "281474976710655 ms");
    }

    #[test]
    fn lengths_of_time_are_rough() {
        for (ms, text) in [(0, "0s"), (340, "340ms"), (12_900, "12s"), (303_000, "5m 3s")] {
            assert_eq!(roughly(Duration::from_millis(ms)), text);
        }
        assert_eq!(roughly(Duration::from_secs(90_000)), "1d 1h");
    }
}
