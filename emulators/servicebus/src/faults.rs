//! Faults on demand, for tests.
//!
//! What lives here: what is to go wrong, and asking whether it is this transfer's turn. What does
//! not: doing it (`connection/`).
//! Invariant: a fault that was asked for N transfers hits the next N and no others.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::broadcast;

use crate::broker::{Broker, key};
use crate::clock::millis;
use crate::refusal::{Refusal, condition};
use crate::shared::Shared;

/// How many commands may wait for a connection that is busy.
const COMMANDS_MAX: usize = 256;

/// What an entity may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Status {
    /// For everything.
    #[default]
    Active,
    /// For nothing.
    Disabled,
    /// For receiving alone.
    SendDisabled,
    /// For sending alone.
    ReceiveDisabled,
}

/// What every connection is to do now.
#[derive(Debug, Clone)]
pub(crate) enum Command {
    /// Take away the links to an entity.
    DetachLinks { key: String, refusal: Refusal },
    /// Give an entity's senders the credit that was withheld.
    GiveCredit { key: String },
    /// Forget all tokens.
    ExpireTokens,
    /// Close, saying why.
    Close(Refusal),
    /// End without a word.
    Drop,
}

/// What becomes of a transfer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is stored; its answer may get lost.
    Store {
        answer: Answer,
    },
    Reject(Refusal),
}

/// What a sender hears of a transfer that was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Given,
    Lost,
    /// The connection ends before it.
    Dropped,
}

#[derive(Debug, Default)]
struct EntityFaults {
    status: Status,
    reject: Option<(u64, Refusal)>,
    throttled_until_ms: Option<i64>,
    full: bool,
    withholds_credit: bool,
    lose_answers: u64,
    drop_after: Option<u64>,
}

#[derive(Debug, Default)]
struct State {
    entities: HashMap<String, EntityFaults>,
    latency: Duration,
    refuse_tokens: u64,
    late_token_answers: u64,
    token_lifetime: Option<Duration>,
}

/// All faults of one emulator.
#[derive(Debug)]
pub(crate) struct FaultState {
    state: Mutex<State>,
    commands: broadcast::Sender<Command>,
}

impl FaultState {
    pub(crate) fn new() -> Self {
        let (commands, _) = broadcast::channel(COMMANDS_MAX);
        Self { state: Mutex::default(), commands }
    }

    pub(crate) fn commands(&self) -> broadcast::Receiver<Command> {
        self.commands.subscribe()
    }

    pub(crate) fn latency(&self) -> Duration {
        self.lock().latency
    }

    pub(crate) fn token_lifetime(&self) -> Option<Duration> {
        self.lock().token_lifetime
    }

    /// Whether the next token is refused.
    pub(crate) fn refuses_token(&self) -> bool {
        let mut state = self.lock();
        let refuses = state.refuse_tokens > 0;
        state.refuse_tokens = state.refuse_tokens.saturating_sub(1);
        refuses
    }

    /// Whether the next token's answer waits for the one after it.
    pub(crate) fn is_token_answer_late(&self) -> bool {
        let mut state = self.lock();
        let late = state.late_token_answers > 0;
        state.late_token_answers = state.late_token_answers.saturating_sub(1);
        late
    }

    /// Whether an entity's senders get no credit.
    pub(crate) fn withholds_credit(&self, key: &str) -> bool {
        self.lock().entities.get(key).is_some_and(|faults| faults.withholds_credit)
    }

    /// Whether an entity may be sent to.
    pub(crate) fn may_send(&self, key: &str) -> Result<(), Refusal> {
        match self.status(key) {
            Status::Active | Status::ReceiveDisabled => Ok(()),
            Status::Disabled | Status::SendDisabled => Err(disabled(key)),
        }
    }

    /// Whether an entity may be received from.
    pub(crate) fn may_receive(&self, key: &str) -> Result<(), Refusal> {
        match self.status(key) {
            Status::Active | Status::SendDisabled => Ok(()),
            Status::Disabled | Status::ReceiveDisabled => Err(disabled(key)),
        }
    }

    fn status(&self, key: &str) -> Status {
        self.lock().entities.get(key).map(|faults| faults.status).unwrap_or_default()
    }

    /// What is to become of a transfer that has just come.
    pub(crate) fn judge(&self, key: &str, now_ms: i64) -> Verdict {
        if let Err(refusal) = self.may_send(key) {
            return Verdict::Reject(refusal);
        }
        let mut state = self.lock();
        let Some(faults) = state.entities.get_mut(key) else {
            return Verdict::Store { answer: Answer::Given };
        };
        if faults.throttled_until_ms.is_some_and(|until| now_ms < until) {
            let text = "The request was terminated because the entity is being throttled. Please \
                wait 4 seconds and try again.";
            return Verdict::Reject(Refusal::new(condition::SERVER_BUSY, text));
        }
        if faults.full {
            let text = format!("The maximum entity size of {key} has been reached.");
            return Verdict::Reject(Refusal::new(condition::RESOURCE_LIMIT, text));
        }
        if let Some((left, refusal)) = &mut faults.reject {
            let refusal = refusal.clone();
            *left -= 1;
            if *left == 0 {
                faults.reject = None;
            }
            return Verdict::Reject(refusal);
        }
        let dropped = match &mut faults.drop_after {
            Some(left) => {
                *left = left.saturating_sub(1);
                *left == 0
            }
            None => false,
        };
        if dropped {
            faults.drop_after = None;
            return Verdict::Store { answer: Answer::Dropped };
        }
        if faults.lose_answers > 0 {
            faults.lose_answers -= 1;
            return Verdict::Store { answer: Answer::Lost };
        }
        Verdict::Store { answer: Answer::Given }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn disabled(key: &str) -> Refusal {
    let text = format!("Messaging entity '{key}' is currently disabled.");
    Refusal::new(condition::ENTITY_DISABLED, text)
}

/// Makes things go wrong. Every call holds from the next frame that comes; entities are named by
/// their path, in any case.
#[derive(Debug, Clone, Copy)]
pub struct Faults<'a> {
    pub(crate) shared: &'a Shared,
}

impl Faults<'_> {
    fn entity(&self, path: &str, change: impl FnOnce(&mut EntityFaults)) {
        change(self.shared.faults.lock().entities.entry(key(path)).or_default());
    }

    fn broker(&self) -> &Broker {
        &self.shared.broker
    }

    fn command(&self, command: Command) {
        // Nobody is connected: then there is nobody to hear it.
        let _ = self.shared.faults.commands.send(command);
    }

    /// Rejects the next transfers to an entity; `condition` is one of [`crate::condition`] or any
    /// other.
    pub fn reject_next(&self, path: &str, transfers: u64, condition: &str) {
        self.reject_next_saying(path, transfers, condition, "Rejected by the emulator on demand.");
    }

    /// The same with a text of one's own beside the condition.
    pub fn reject_next_saying(&self, path: &str, transfers: u64, condition: &str, text: &str) {
        let refusal = Refusal::new(condition, text);
        self.entity(path, |faults| faults.reject = (transfers > 0).then_some((transfers, refusal)));
    }

    /// Rejects transfers as `com.microsoft:server-busy` for a while of the emulator's clock.
    pub fn throttle_for(&self, path: &str, duration: Duration) {
        let until = self.broker().clock.now_ms().saturating_add(millis(duration));
        self.entity(path, |faults| faults.throttled_until_ms = Some(until));
    }

    /// Stores the next transfers but never says so: their sender waits in vain.
    pub fn lose_confirmations(&self, path: &str, transfers: u64) {
        self.entity(path, |faults| faults.lose_answers = transfers);
    }

    /// Stores so many transfers from now on and ends the last one's connection without answering
    /// it; 0 takes the fault back.
    pub fn drop_connection_after(&self, path: &str, transfers: u64) {
        self.entity(path, |faults| faults.drop_after = (transfers > 0).then_some(transfers));
    }

    /// Whether the entity says that it is full.
    pub fn set_full(&self, path: &str, full: bool) {
        self.entity(path, |faults| faults.full = full);
    }

    /// Whether senders that attach from now on get no credit, and others no more of it. Taking it
    /// back gives every sender its credit.
    pub fn withhold_credit(&self, path: &str, withheld: bool) {
        self.entity(path, |faults| faults.withholds_credit = withheld);
        if !withheld {
            self.command(Command::GiveCredit { key: key(path) });
        }
    }

    /// Switches an entity off or on. Links that it then can't serve are taken away with
    /// `com.microsoft:entity-disabled`.
    pub fn set_status(&self, path: &str, status: Status) {
        self.entity(path, |faults| faults.status = status);
        if status != Status::Active {
            let refusal = disabled(path);
            self.command(Command::DetachLinks { key: key(path), refusal });
        }
    }

    /// Takes away all links to an entity, senders' and receivers', with a condition.
    pub fn detach_links(&self, path: &str, condition: &str) {
        let refusal = Refusal::new(condition, "Detached by the emulator on demand.");
        self.command(Command::DetachLinks { key: key(path), refusal });
    }

    /// Ends all connections without a word.
    pub fn drop_connections(&self) {
        self.command(Command::Drop);
    }

    /// Closes all connections with a condition.
    pub fn close_connections(&self, condition: &str) {
        self.command(Command::Close(Refusal::new(condition, "Closed by the emulator on demand.")));
    }

    /// Answers the next put-token requests with 401.
    pub fn refuse_tokens(&self, requests: u64) {
        self.shared.faults.lock().refuse_tokens = requests;
    }

    /// Answers the next put-token requests only when their connection makes another one, just
    /// before that one's answer.
    pub fn answer_tokens_late(&self, requests: u64) {
        self.shared.faults.lock().late_token_answers = requests;
    }

    /// Lets every token expire now: links are taken away with `amqp:unauthorized-access`.
    pub fn expire_tokens(&self) {
        self.command(Command::ExpireTokens);
    }

    /// Lets tokens that come from now on be valid for no longer than this, whatever they say.
    pub fn set_token_lifetime(&self, lifetime: Option<Duration>) {
        self.shared.faults.lock().token_lifetime = lifetime;
    }

    /// Holds back every frame of the emulator for so long; frames keep their order, and what comes
    /// in is read at once.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.faults.lock().latency = latency;
    }

    /// Takes everything back. What has happened stays.
    pub fn clear(&self) {
        *self.shared.faults.lock() = State::default();
    }
}
