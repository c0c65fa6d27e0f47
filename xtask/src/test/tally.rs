//! Counts of tests, read from what the test runners print.
//!
//! What lives here: `Tally` and the two formats it is read from. What does not: running tests.
//! Invariant: a line that is no closing line of a runner counts nothing.

use std::fmt;
use std::iter::Sum;

/// How many tests passed, failed and were not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Tally {
    /// Adds up every closing line of `cargo test` and `cargo nextest` in an output.
    pub(super) fn of(output: &str) -> Self {
        output.lines().filter_map(|line| libtest(line).or_else(|| nextest(line))).sum()
    }

    /// Adds a part such as `3 passed`; other parts (`0 measured`) count nothing.
    fn add(&mut self, part: &str) {
        let mut words = part.trim().splitn(2, ' ');
        let Some(Ok(count)) = words.next().map(str::parse::<u64>) else { return };
        match words.next().unwrap_or_default().trim() {
            "passed" => self.passed += count,
            "failed" | "timed out" | "exec failed" => self.failed += count,
            "skipped" | "ignored" => self.skipped += count,
            _ => {}
        }
    }
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s`
fn libtest(line: &str) -> Option<Tally> {
    // nextest shows a failed test's own output, indented: that test is in its summary already.
    let counts = line.strip_prefix("test result: ")?;
    let mut tally = Tally::default();
    for part in counts.split_once(". ")?.1.split(';') {
        tally.add(part);
    }
    Some(tally)
}

/// `Summary [ 1.2s] 10 tests run: 8 passed (1 slow, 1 flaky), 1 failed, 1 timed out, 0 skipped`
fn nextest(line: &str) -> Option<Tally> {
    let counts = line.trim().strip_prefix("Summary [")?;
    let counts = counts.split_once("run: ")?.1;
    let mut tally = Tally::default();
    for part in without_parentheses(counts).split(',') {
        tally.add(part);
    }
    Some(tally)
}

fn without_parentheses(text: &str) -> String {
    let mut depth = 0_u32;
    let outside = text.chars().filter(|c| {
        if *c == '(' {
            depth += 1;
        }
        let keep = depth == 0;
        if *c == ')' {
            depth = depth.saturating_sub(1);
        }
        keep
    });
    outside.collect()
}

impl Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(tallies: I) -> Self {
        tallies.fold(Self::default(), |sum, tally| Self {
            passed: sum.passed + tally.passed,
            failed: sum.failed + tally.failed,
            skipped: sum.skipped + tally.skipped,
        })
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_runners_are_understood_and_other_lines_count_nothing() {
        let output = "running 4 tests\ntest a ... ok\n\
            test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 7 filtered out; \
            finished in 0.10s\n\
            \x20    Summary [   1.234s] 12/20 tests run: 8 passed (1 slow, 1 flaky), 2 failed, \
            1 timed out, 1 exec failed, 5 skipped\n\
            \x20    Summary [   0.001s] 1 test run: 1 passed, 0 skipped\n\
            9 passed, 9 failed\n";
        assert_eq!(Tally::of(output), Tally { passed: 12, failed: 5, skipped: 7 });
        assert_eq!(Tally::of("test result: ok. nonsense"), Tally::default());
        let shown = "    test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured;";
        assert_eq!(Tally::of(shown), Tally::default());
    }

    #[test]
    fn the_closing_line_has_its_form() {
        let tally = |skipped| Tally { passed: 7, failed: 1, skipped }.to_string();
        assert_eq!(tally(0), "7 passed, 1 failed");
        assert_eq!(tally(2), "7 passed, 1 failed, 2 skipped");
    }
}
