//! Many schedules, a few at a time, and their sum.
//!
//! What lives here: the run, its report for people and its closing line. What does not: a schedule.
//! Invariant: the exit code is success only if every schedule passed; a failed one prints what it
//! takes to replay it.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use postrider_conformance::oracle::{Run, Verdict};

use crate::cluster::Templates;
use crate::play::{Played, play};
use crate::schedule::{Schedule, SinkKind, SourceKind};

/// Which schedules to run.
#[derive(Debug, Clone)]
pub struct Campaign {
    /// From which source.
    pub source: SourceKind,
    /// To which sink.
    pub sink: SinkKind,
    /// The run's seed.
    pub seed: u64,
    /// The schedules' numbers.
    pub indices: Vec<u64>,
    /// How many events each of them appends at least, if not as many as come.
    pub events: Option<u64>,
    /// How many at once.
    pub jobs: usize,
    /// Whether the closing line is printed.
    pub json: bool,
}

impl Campaign {
    fn schedule(&self, index: u64) -> Schedule {
        let Self { seed, source, sink, events, .. } = *self;
        match events {
            Some(events) => Schedule::with_events(seed, index, sink, events),
            None => Schedule::derive(seed, index, source, sink),
        }
    }
}

/// The sum of what was run.
#[derive(Debug, Clone, Default)]
pub struct Sum {
    run: Run,
    verdict: Verdict,
    failed: Vec<u64>,
}

impl Sum {
    /// Adds a schedule; `None` when it could not be played.
    fn add(&mut self, index: u64, played: Option<&Played>) {
        self.run.schedules += 1;
        let passed = played.is_some_and(|played| played.judgement.passed());
        if let Some(played) = played {
            self.verdict = self.verdict.plus(played.judgement.verdict);
            self.run.duplicates_allowed += played.judgement.duplicates_allowed;
        }
        if !passed {
            self.failed.push(index);
        }
    }

    /// Success only if every schedule passed and the sums agree.
    pub fn exit_code(&self) -> ExitCode {
        let passed = self.failed.is_empty() && self.verdict.holds(&self.run);
        if passed && self.run.schedules > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Runs the campaign.
pub fn run(campaign: &Campaign, binary: &Path) -> Sum {
    let begun = Instant::now();
    let next = AtomicU64::new(0);
    let run = Run {
        source: campaign.source.to_string(),
        sink: campaign.sink.to_string(),
        seed: campaign.seed,
        ..Run::default()
    };
    let templates = Templates::default();
    let sum = Mutex::new(Sum { run, ..Sum::default() });
    std::thread::scope(|scope| {
        for _ in 0..campaign.jobs {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::SeqCst);
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    let Some(index) = campaign.indices.get(at) else { return };
                    let schedule = campaign.schedule(*index);
                    let played = play(&schedule, &templates, binary);
                    let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
                    report(&schedule, &played);
                    sum.add(*index, played.ok().as_ref());
                }
            });
        }
    });
    let sum = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    close(&sum, campaign, begun);
    sum
}

fn report(schedule: &Schedule, played: &anyhow::Result<Played>) {
    let Schedule { source, sink, index, seed, .. } = schedule;
    let events = schedule.events.map(|events| format!(" --events {events}")).unwrap_or_default();
    let replay = format!(
        "cargo xtask faults --source {source} --sink {sink}{events} --seed {seed} --only {index}"
    );
    match played {
        Err(error) => {
            eprintln!("{source} {sink} {index}: NOT PLAYED: {error:#}\n    replay: {replay}")
        }
        Ok(played) => {
            let judgement = &played.judgement;
            let verdict = judgement.verdict;
            let word = if judgement.passed() { "passed" } else { "FAILED" };
            eprintln!(
                "{source} {sink} {index}: {word} in {:.1} s: {} faults, {} appended, {} delivered, \
                 {} duplicates of {} allowed",
                played.took.as_secs_f64(),
                played.faults,
                verdict.appended,
                verdict.delivered,
                verdict.duplicates,
                judgement.duplicates_allowed
            );
            for finding in &judgement.findings {
                eprintln!("    {finding}");
            }
            if let Some(kept) = &played.kept {
                eprintln!("    kept in {}\n    replay: {replay}", kept.display());
            }
        }
    }
}

fn close(sum: &Sum, campaign: &Campaign, begun: Instant) {
    eprintln!(
        "{} schedules with seed {}, {} failed {:?}, in {:.0} s",
        sum.run.schedules,
        campaign.seed,
        sum.failed.len(),
        sum.failed,
        begun.elapsed().as_secs_f64()
    );
    let line = sum.verdict.to_json_line(&sum.run);
    if campaign.json {
        println!("{line}");
    } else {
        eprintln!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::verdict::Judgement;

    fn played(verdict: Verdict, findings: &[&str]) -> Played {
        let findings = findings.iter().map(|text| (*text).to_owned()).collect();
        let judgement = Judgement { verdict, duplicates_allowed: 2, findings };
        Played { judgement, took: Duration::ZERO, faults: 0, kept: None }
    }

    fn code(all: &[Option<Played>]) -> bool {
        let mut sum = Sum::default();
        for (index, played) in all.iter().enumerate() {
            sum.add(index as u64, played.as_ref());
        }
        format!("{:?}", sum.exit_code()) == format!("{:?}", ExitCode::SUCCESS)
    }

    #[test]
    fn the_exit_code_is_success_only_if_every_count_is() {
        let good = Verdict { appended: 5, delivered: 5, ..Verdict::default() };
        let clean = || Some(played(good, &[]));
        assert!(code(&[clean(), clean()]));
        for bad in [
            Verdict { missing: 1, ..good },
            Verdict { inversions: 1, ..good },
            Verdict { phantom: 1, ..good },
            Verdict { altered: 1, ..good },
            Verdict { duplicates: 3, ..good },
        ] {
            assert!(!code(&[clean(), Some(played(bad, &[])), clean()]), "{bad:?}");
        }
        assert!(code(&[Some(played(Verdict { duplicates: 2, ..good }, &[]))]));
        assert!(!code(&[clean(), Some(played(good, &["a relay ended with code 1"]))]));
        assert!(!code(&[clean(), None]), "what could not be played has not passed");
        assert!(!code(&[]), "nothing run proves nothing");
    }
}
