//! The task that owns the connection.
//!
//! What lives here: connecting when somebody wants to send, handing transfers over in the order in
//! which they were given, renewing the token, connecting anew. What does not: waiting until a
//! transfer is settled, which each caller does by itself.
//! Invariant: a transfer is written to the link whole or the link is given up: its frames would
//! otherwise run into those of the next. A link with a transfer for which nobody waits any more is
//! given up and its socket cut, before there is another: what was abandoned, or timed out, can't
//! leave this host later, behind newer events of its key.
//!
//! ```text
//!             a command                      attached
//! [idle] ───────────────────▶ [connecting] ───────────▶ [linked] ── close ──▶ [closed]
//!    ▲                             │  ▲ └─ refused: all who wait are told, then a pause
//!    │                             ▼  │                     │
//!    └──────────── link or token lost; the next command connects
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fe2o3_amqp::Sender;
use fe2o3_amqp::link::SendError;
use fe2o3_amqp::link::delivery::DeliveryFut;
use fe2o3_amqp::types::messaging::Outcome;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::batch::{Limits, Transfer};
use crate::connect::{Dialer, Link, TokenLink};
use crate::error::{self, Failure, Fate};
use crate::line::Cutter;

/// The first pause after a connection that failed; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest one. The relay has back-offs of its own above this.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A link that was lost sooner, without having taken anything, counts as one that failed.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// How long a check waits for a refusal after the attach: some come only then.
const REFUSAL_WAIT: Duration = Duration::from_millis(250);
/// How long closing may take.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// A transfer that was handed over. Whoever drops it before it is settled gives its link up.
pub(crate) struct Handed {
    waited_for: WaitedFor,
    settlement: DeliveryFut<Result<Outcome, SendError>>,
    /// Why its link ended, once it has.
    end: watch::Receiver<Option<Failure>>,
    /// Set once the link has taken a transfer.
    useful: Arc<AtomicBool>,
}

/// Cuts the connection when it is dropped with the wait unfinished.
struct WaitedFor {
    cutter: Cutter,
    finished: bool,
}

impl Drop for WaitedFor {
    fn drop(&mut self) {
        if !self.finished {
            self.cutter.cut();
        }
    }
}

impl Handed {
    /// What became of it. The end of its link is looked at beside the settlement: a connection
    /// that breaks amid many transfers does not end the settlement of each.
    pub(crate) async fn fate(self) -> Fate {
        let Self { mut waited_for, settlement, mut end, useful } = self;
        let settled = tokio::select! {
            biased;
            settled = settlement => settled,
            ended = end.wait_for(Option::is_some) => {
                waited_for.finished = true;
                let why = ended.ok().and_then(|end| end.clone());
                return Fate::Unknown(why.unwrap_or_else(error::given_up));
            }
        };
        waited_for.finished = true;
        match settled {
            Ok(outcome) => {
                let fate = error::of_outcome(&outcome);
                useful.fetch_or(fate == Fate::Accepted, Ordering::Relaxed);
                fate
            }
            Err(failed) => match (error::is_bare_end(&failed), end.borrow().as_ref()) {
                (true, Some(why)) => Fate::Unknown(why.clone()),
                _ => error::of_send(&failed).after_hand_over(),
            },
        }
    }
}

/// What the worker is asked for.
pub(crate) enum Command {
    /// An open link; its limits are the answer.
    Connect(oneshot::Sender<Result<Limits, Failure>>),
    /// The same, and whether it stays open.
    Check(oneshot::Sender<Result<(), Failure>>),
    /// Handing over a transfer.
    Send(Box<Transfer>, oneshot::Sender<Result<Handed, Fate>>),
    /// The end.
    Close(oneshot::Sender<()>),
}

/// How a link ended.
enum End {
    /// Everybody who could ask is gone.
    Abandoned,
    /// It was asked for.
    Close(oneshot::Sender<()>),
    /// Anything else.
    Lost,
}

/// The last limits that are known.
pub(crate) type SharedLimits = Arc<Mutex<Option<Limits>>>;

/// The state of the task.
pub(crate) struct Worker {
    pub(crate) dialer: Arc<Dialer>,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) limits: SharedLimits,
}

impl Worker {
    /// Runs until it is closed, or nobody can ask any more.
    pub(crate) async fn run(mut self) {
        let mut pause = Pause::default();
        let mut useful: Arc<AtomicBool> = Arc::default();
        // A command is looked at once there is a link for it.
        while let Some(first) = self.commands.recv().await {
            if let Command::Close(answer) = first {
                let _ = answer.send(());
                return;
            }
            if useful.swap(false, Ordering::Relaxed) {
                pause = Pause::default();
            }
            pause.over().await;
            match self.dialer.connect().await {
                Ok(link) => {
                    *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = Some(link.limits);
                    let begin = Instant::now();
                    useful = Arc::default();
                    match self.serve(link, first, &useful).await {
                        End::Abandoned => return,
                        End::Close(answer) => {
                            let _ = answer.send(());
                            return;
                        }
                        End::Lost if begin.elapsed() < SHORT_LIFE => pause.longer(),
                        End::Lost => pause = Pause::default(),
                    }
                }
                Err(failure) => {
                    pause.longer();
                    if self.refuse(first, &failure) {
                        return;
                    }
                }
            }
        }
    }

    /// Tells everybody who waits; whether one of them asked for the end.
    fn refuse(&mut self, first: Command, failure: &Failure) -> bool {
        let mut next = Some(first);
        while let Some(command) = next {
            // Whoever no longer listens has given up by himself.
            match command {
                Command::Connect(answer) => drop(answer.send(Err(failure.clone()))),
                Command::Check(answer) => drop(answer.send(Err(failure.clone()))),
                Command::Send(_, answer) => {
                    drop(answer.send(Err(Fate::Failed(failure.clone()))));
                }
                Command::Close(answer) => {
                    let _ = answer.send(());
                    return true;
                }
            }
            next = self.commands.try_recv().ok();
        }
        false
    }

    async fn serve(&mut self, mut link: Link, first: Command, useful: &Arc<AtomicBool>) -> End {
        let dialer = Arc::clone(&self.dialer);
        let (why, _) = watch::channel(None);
        let cutter = link.cut.0.clone();
        let mut pump = Pump { sender: &mut link.sender, limits: link.limits, cutter, why, useful };
        let end = tokio::select! {
            end = pump.run(&mut self.commands, first) => end,
            // The link won't be believed any longer.
            () = renew(&dialer, &mut link.tokens) => End::Lost,
        };
        if let End::Close(_) = end {
            let closing = async {
                // What is still to be said when it fails was said to every sender already.
                let _ = link.sender.close().await;
                let _ = link.connection.close().await;
            };
            let _ = timeout(CLOSE_WAIT, closing).await;
        }
        end
    }
}

/// Hands over what comes.
struct Pump<'a> {
    sender: &'a mut Sender,
    limits: Limits,
    cutter: Cutter,
    /// Why the link ended, for those who wait for a settlement.
    why: watch::Sender<Option<Failure>>,
    useful: &'a Arc<AtomicBool>,
}

impl Pump<'_> {
    /// Works until the link ends.
    async fn run(&mut self, commands: &mut mpsc::Receiver<Command>, first: Command) -> End {
        let mut next = Some(first);
        loop {
            let command = match next.take() {
                Some(command) => command,
                None => tokio::select! {
                    biased;
                    // Links end when they are idle, too: the next transfer shall not run into it.
                    failure = lost(self.sender, &self.cutter) => {
                        self.why.send_replace(Some(failure));
                        return End::Lost;
                    }
                    command = commands.recv() => match command {
                        Some(command) => command,
                        None => return End::Abandoned,
                    },
                },
            };
            let done = match command {
                Command::Connect(answer) => {
                    let _ = answer.send(Ok(self.limits));
                    Ok(())
                }
                Command::Check(answer) => self.check(answer).await,
                // Nobody waits for it any more: it will be given again.
                Command::Send(_, answer) if answer.is_closed() => Ok(()),
                Command::Send(transfer, answer) => self.hand_over(*transfer, answer).await,
                Command::Close(answer) => return End::Close(answer),
            };
            if let Err(failure) = done {
                self.why.send_replace(Some(failure));
                return End::Lost;
            }
        }
    }

    /// An error is the end of the link, here and below.
    async fn check(&mut self, answer: oneshot::Sender<Result<(), Failure>>) -> Result<(), Failure> {
        let failure = tokio::select! {
            failure = lost(self.sender, &self.cutter) => failure,
            () = sleep(REFUSAL_WAIT) => {
                let _ = answer.send(Ok(()));
                return Ok(());
            }
        };
        let _ = answer.send(Err(failure.clone()));
        Err(failure)
    }

    /// The library may wait for credit without an end, also past credit that has come. The answer's
    /// other end is gone when its time is over, which ends the wait and the link: a transfer that
    /// was half handed over can't be taken back, and one that was not must not go out later.
    async fn hand_over(
        &mut self,
        transfer: Transfer,
        mut answer: oneshot::Sender<Result<Handed, Fate>>,
    ) -> Result<(), Failure> {
        let sender = &mut *self.sender;
        let sending = async {
            match transfer {
                Transfer::One(message) => sender.send_batchable(message).await,
                Transfer::Many(message) => sender.send_batchable(Transfer::many(message)).await,
            }
        };
        let sent = tokio::select! {
            biased;
            () = answer.closed() => return Err(error::given_up()),
            () = self.cutter.was_cut() => {
                let _ = answer.send(Err(Fate::Failed(error::not_handed_over())));
                return Err(error::given_up());
            }
            sent = sending => sent,
        };
        match sent {
            Ok(settlement) => {
                let waited_for = WaitedFor { cutter: self.cutter.clone(), finished: false };
                let (end, useful) = (self.why.subscribe(), Arc::clone(self.useful));
                // If nobody takes it, dropping it here is the end of the link.
                drop(answer.send(Ok(Handed { waited_for, settlement, end, useful })));
                Ok(())
            }
            Err(error) => {
                let fate = error::of_send(&error);
                let lost = !error.recovery().link_is_usable();
                let why = match (lost, &fate) {
                    (false, _) => Ok(()),
                    (true, Fate::Failed(failure) | Fate::Unknown(failure)) => Err(failure.clone()),
                    (true, Fate::Accepted | Fate::Refused(_)) => Err(error::given_up()),
                };
                let _ = answer.send(Err(fate));
                why
            }
        }
    }
}

/// Waits for the end of a link: the service's, or that somebody gave it up.
async fn lost(sender: &mut Sender, cutter: &Cutter) -> Failure {
    tokio::select! {
        biased;
        () = cutter.was_cut() => error::given_up(),
        error = sender.on_detach() => error::of_detach(&error),
    }
}

/// Keeps the token fresh; ends when the last one accepted has expired, or when an answer is late
/// that could be taken for the next one's.
async fn renew(dialer: &Dialer, link: &mut TokenLink) {
    let mut failed = false;
    loop {
        let Some(expires_at) = link.expires_at else { return std::future::pending().await };
        let left = expires_at.since(dialer.clock.now());
        if left.is_zero() {
            return;
        }
        // The last third of the life is kept for attempts that fail.
        let wait = if failed { (left / 8).max(FIRST_PAUSE) } else { left.mul_f64(2.0 / 3.0) };
        sleep(wait).await;
        failed = match dialer.put_token(link).await {
            Ok(()) => false,
            Err(not_taken) if not_taken.may_ask_again => true,
            Err(_) => return,
        };
    }
}

/// The pause before the next connection.
#[derive(Default)]
struct Pause {
    length: Duration,
    until: Option<Instant>,
}

impl Pause {
    fn longer(&mut self) {
        self.length = (self.length * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.until = Some(Instant::now() + self.length);
    }

    async fn over(&self) {
        if let Some(until) = self.until {
            sleep_until(until).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_bound() {
        let mut pause = Pause::default();
        let mut lengths = Vec::new();
        for _ in 0..8 {
            pause.longer();
            lengths.push(pause.length.as_millis());
        }
        assert_eq!(lengths, [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]);
    }
}
