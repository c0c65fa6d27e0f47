//! One measured figure, as benchmarks print theirs.
//!
//! What lives here: its forms for people and for programs. What does not: measuring.
//! Invariant: a goal here is absolute, so there is neither baseline nor ratio.

use serde::Serialize;

/// A figure with its goal.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// What measured it.
    pub bench: &'static str,
    /// What it is.
    pub figure: String,
    /// What came out.
    pub value: f64,
    /// In what.
    pub unit: &'static str,
    baseline: (),
    ratio: (),
    /// What it may be at most; none if it is only told.
    pub goal: Option<f64>,
    /// Whether it is.
    pub met: bool,
}

impl Figure {
    /// A figure that may be no larger than its goal.
    pub fn at_most(
        bench: &'static str,
        figure: impl Into<String>,
        value: f64,
        unit: &'static str,
        goal: Option<f64>,
    ) -> Self {
        let met = goal.is_none_or(|goal| value <= goal);
        Self { bench, figure: figure.into(), value, unit, baseline: (), ratio: (), goal, met }
    }

    /// The line for programs.
    ///
    /// # Panics
    /// Never: numbers and texts serialise.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("numbers and texts serialise")
    }

    /// The line for people.
    pub fn text(&self) -> String {
        let Self { figure, value, unit, goal, met, .. } = self;
        let verdict = if *met { "met" } else { "MISSED" };
        let goal = goal.map(|goal| format!("  goal <= {goal}: {verdict}")).unwrap_or_default();
        format!("{figure:<44} {value:>10.1} {unit}{goal}")
    }
}
