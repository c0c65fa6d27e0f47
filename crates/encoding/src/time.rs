//! Times as text: RFC 3339 with milliseconds.
//!
//! What lives here: the one form in which messages carry times, and its parser. What does not:
//! reading a clock.
//! Invariant: a formatted time parses to the same `Timestamp`, up to the end of the year 9999.

use jiff::fmt::temporal::DateTimePrinter;
use postrider_core::{Error, Result, Timestamp};

/// Milliseconds are always written, so that texts of one sink compare as times do.
const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));

/// The time as `2023-01-02T15:04:05.000Z`; beyond the year 9999 the largest time of that form.
pub fn format_rfc3339(time: Timestamp) -> String {
    let ms = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
    let time = jiff::Timestamp::from_millisecond(ms).unwrap_or(jiff::Timestamp::MAX);
    PRINTER.timestamp_to_string(&time)
}

/// Reads a time with any offset; fractions below a millisecond are cut off.
///
/// # Errors
/// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) if the text is no RFC 3339 time
/// or lies before 1970.
pub fn parse_rfc3339(text: &str) -> Result<Timestamp> {
    let bad = || Error::permanent("time is not of the form 2023-01-02T15:04:05Z, from 1970 on");
    let time: jiff::Timestamp = text.parse().map_err(|cause| bad().with_source(cause))?;
    let ms = u64::try_from(time.as_millisecond()).map_err(|_| bad())?;
    Ok(Timestamp::from_millis(ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn milliseconds_are_always_written() {
        let text = format_rfc3339(Timestamp::from_millis(1_672_671_845_000));
        assert_eq!(text, "2023-01-02T15:04:05.000Z");
        let text = format_rfc3339(Timestamp::from_millis(1_672_671_845_120));
        assert_eq!(text, "2023-01-02T15:04:05.120Z");
    }

    #[test]
    fn offsets_are_understood_and_times_before_1970_refused() {
        let time = parse_rfc3339("2023-01-02T17:04:05.5+02:00").expect("valid");
        assert_eq!(time, Timestamp::from_millis(1_672_671_845_500));
        assert!(parse_rfc3339("1969-12-31T23:59:59Z").is_err());
        assert!(format_rfc3339(Timestamp::from_millis(u64::MAX)).starts_with("9999-12-"));
    }

    proptest! {
        #[test]
        fn formatted_times_read_back(ms in 0u64..253_402_207_200_000) {
            let time = Timestamp::from_millis(ms);
            prop_assert_eq!(parse_rfc3339(&format_rfc3339(time)).expect("own text"), time);
        }

        #[test]
        fn parsing_never_panics(text in ".{0,40}") {
            let _ = parse_rfc3339(&text);
        }
    }
}
