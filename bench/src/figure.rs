//! Figures: medians, spreads, goals, and how they are printed.
//!
//! What lives here: judging and printing. What does not: measuring.
//! Invariant: one line a figure; `--check` fails when any goal is missed.

use std::process::ExitCode;

/// What a figure must reach.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(goal) => value >= goal,
            Self::AtMost(goal) => value <= goal,
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtLeast(goal) => format!(">= {goal}"),
            Self::AtMost(goal) => format!("<= {goal}"),
        }
    }
}

/// Several measurements of one thing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(pub(crate) Vec<f64>);

impl Samples {
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            odd if odd % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    fn spread(&self) -> (f64, f64) {
        let low = self.0.iter().copied().fold(f64::INFINITY, f64::min);
        let high = self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (low, high)
    }
}

pub(crate) struct Report {
    bench: &'static str,
    json: bool,
    only: Option<String>,
    missed: u32,
}

impl Report {
    pub(crate) fn new(bench: &'static str, json: bool, only: Option<String>) -> Self {
        Self { bench, json, only, missed: 0 }
    }

    pub(crate) fn wants(&self, figure: &str) -> bool {
        let wanted = self.only.as_ref().is_none_or(|part| figure.contains(part.as_str()));
        if wanted {
            eprintln!("measuring {figure} …");
        }
        wanted
    }

    /// An absolute figure.
    pub(crate) fn absolute(
        &mut self,
        figure: &str,
        samples: &Samples,
        unit: &str,
        goal: Option<Goal>,
    ) {
        self.print(figure, samples, unit, None, goal);
    }

    /// A figure whose goal is its ratio to a baseline, from alternating pairs.
    pub(crate) fn ratio(&mut self, figure: &str, pairs: &[(f64, f64)], unit: &str, goal: Goal) {
        self.pairs(figure, pairs, unit, Some(goal));
    }

    /// A ratio that is told and not judged.
    pub(crate) fn ratio_without_goal(&mut self, figure: &str, pairs: &[(f64, f64)], unit: &str) {
        self.pairs(figure, pairs, unit, None);
    }

    fn pairs(&mut self, figure: &str, pairs: &[(f64, f64)], unit: &str, goal: Option<Goal>) {
        let values = Samples(pairs.iter().map(|(value, _)| *value).collect());
        let baseline = Samples(pairs.iter().map(|(_, base)| *base).collect());
        let ratios = Samples(pairs.iter().map(|(value, base)| value / base).collect());
        self.print(figure, &values, unit, Some((baseline.median(), ratios)), goal);
    }

    fn print(
        &mut self,
        figure: &str,
        samples: &Samples,
        unit: &str,
        against: Option<(f64, Samples)>,
        goal: Option<Goal>,
    ) {
        let value = samples.median();
        let judged = against.as_ref().map_or(value, |(_, ratios)| ratios.median());
        let met = goal.is_none_or(|goal| goal.is_met(judged));
        self.missed += u32::from(!met);
        let goal_text = goal.map(Goal::text);
        let (baseline, ratio) = match &against {
            Some((baseline, ratios)) => (Some(*baseline), Some(ratios.median())),
            None => (None, None),
        };
        if self.json {
            let line = serde_json::json!({
                "bench": self.bench, "figure": figure, "value": value, "unit": unit,
                "baseline": baseline, "ratio": ratio, "goal": goal_text, "met": met,
            });
            println!("{line}");
            return;
        }
        let (low, high) = against.as_ref().map_or(samples.spread(), |(_, r)| r.spread());
        let against = match (baseline, ratio) {
            (Some(base), Some(ratio)) => format!(" = {ratio:.3} x {base:.1}"),
            _ => String::new(),
        };
        let n = samples.0.len();
        let verdict = if met { "met" } else { "MISSED" };
        let goal = goal_text.map_or_else(String::new, |goal| format!("  goal {goal}: {verdict}"));
        println!(
            "{figure:<44} {value:>12.1} {unit}{against}  ({low:.3} … {high:.3}, n = {n}){goal}"
        );
    }

    pub(crate) fn end(self, check: bool) -> ExitCode {
        if self.missed > 0 {
            eprintln!("{} goal(s) missed", self.missed);
        }
        if check && self.missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_goals() {
        assert!((Samples(vec![3.0, 1.0, 2.0]).median() - 2.0).abs() < 1e-9);
        assert!((Samples(vec![4.0, 1.0, 2.0, 3.0]).median() - 2.5).abs() < 1e-9);
        assert!(Goal::AtLeast(1.0).is_met(1.0) && !Goal::AtLeast(1.0).is_met(0.9));
        assert!(Goal::AtMost(1.0).is_met(1.0) && !Goal::AtMost(1.0).is_met(1.1));
    }

    #[test]
    fn a_missed_goal_fails_the_check() {
        let mut report = Report::new("t", true, None);
        report.absolute("slow", &Samples(vec![1.0]), "x", Some(Goal::AtLeast(2.0)));
        assert_eq!(report.missed, 1);
        assert_eq!(report.end(true), ExitCode::FAILURE);
    }
}
