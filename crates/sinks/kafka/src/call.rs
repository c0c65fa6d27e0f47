//! The events of one call on their way.
//!
//! What lives here: one loop that hands them to the client, whose turn it is, and whose time is
//! over. What does not: what a refusal means (`publish.rs`), and transactions (`transact.rs`).
//! Invariant: of one key at most one event is under way, and nothing is sent behind one that
//! failed. An answer costs no task of its own: those that came together are heard together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use postrider_core::{Outcome, Record, Result, by_key};
use rdkafka::error::RDKafkaErrorCode as Code;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::time::{Instant, sleep, sleep_until};

use crate::connect::{Answer, Link, Ticket, Told};
use crate::publish::{GRACE, Kafka, QUEUE_POLL, Wrong, again};

/// Answers heard at a time.
const HEARD: usize = 128;
/// The loop looks about itself at least so often.
const IDLE_WAIT: Duration = Duration::from_secs(60);

/// What the events of one call have in common.
pub(crate) struct Call<'a> {
    pub(crate) link: Arc<Link>,
    pub(crate) records: &'a [Record],
    /// The topic of each.
    pub(crate) topics: Vec<Result<String>>,
    /// What is wrong with some topics.
    pub(crate) wrong: Wrong,
    /// For as long as the call may send.
    pub(crate) until: Instant,
}

/// An event that was not confirmed, by which producer, and why.
pub(crate) struct Refused {
    pub(crate) place: usize,
    pub(crate) link: Arc<Link>,
    pub(crate) code: Code,
}

/// An event that was handed to the client. Who no longer waits for its answer must not have it
/// sent later.
pub(crate) struct Waiting {
    pub(crate) link: Arc<Link>,
    pub(crate) answered: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.answered {
            self.link.retire();
        }
    }
}

/// Sends a call's events, each key's one after the other up to the first that fails.
pub(crate) async fn send(sink: &Kafka, call: &Call<'_>) -> Vec<Outcome> {
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut round = Round::new(sink, call, tell);
    let mut refusals = FuturesUnordered::new();
    let mut heard = Vec::with_capacity(HEARD);
    loop {
        let is_full = round.send_ready().await;
        refusals.extend(round.refused.drain(..).map(|refused| sink.refused(call, refused)));
        if round.sent == 0 && round.ready.is_empty() && refusals.is_empty() {
            return round.outcomes();
        }
        let due = round.due().unwrap_or_else(|| Instant::now() + IDLE_WAIT);
        tokio::select! {
            biased;
            _ = told.recv_many(&mut heard, HEARD) => {
                heard.drain(..).for_each(|(place, answer)| round.hear(place, answer));
            }
            Some((place, judged)) = refusals.next() => round.settle(place, judged),
            () = sleep_until(due) => round.give_up(Instant::now()),
            () = sleep(QUEUE_POLL), if is_full => {}
        }
    }
}

struct Round<'a> {
    sink: &'a Kafka,
    call: &'a Call<'a>,
    /// The producer of the call's begin, or the one that replaced it.
    link: Arc<Link>,
    /// Those whose turn it is.
    ready: VecDeque<usize>,
    /// Behind each event the next one of its key.
    next: Vec<Option<usize>>,
    /// Those under way.
    waiting: Vec<Option<Waiting>>,
    /// How many those are.
    sent: usize,
    /// Until when an answer is waited for, in the order of sending; of answered ones, too.
    due: VecDeque<(Instant, usize)>,
    refused: Vec<Refused>,
    outcomes: Vec<Option<Outcome>>,
    tell: UnboundedSender<Told>,
}

impl<'a> Round<'a> {
    fn new(sink: &'a Kafka, call: &'a Call<'a>, tell: UnboundedSender<Told>) -> Self {
        let mut next = vec![None; call.records.len()];
        let mut ready = VecDeque::with_capacity(call.records.len());
        for chain in by_key(call.records) {
            ready.extend(chain.first());
            for pair in chain.windows(2) {
                next[pair[0]] = Some(pair[1]);
            }
        }
        Self {
            sink,
            call,
            link: Arc::clone(&call.link),
            ready,
            next,
            waiting: call.records.iter().map(|_| None).collect(),
            sent: 0,
            due: VecDeque::with_capacity(call.records.len()),
            refused: Vec::new(),
            outcomes: call.records.iter().map(|_| None).collect(),
            tell,
        }
    }

    /// Hands over whose turn it is; whether the client's queue is full.
    async fn send_ready(&mut self) -> bool {
        while let Some(place) = self.ready.pop_front() {
            // The producer of the call's begin may have given up.
            if !self.link.is_up() {
                match self.sink.link_for_many().await {
                    Ok(link) => self.link = link,
                    Err(error) => {
                        self.settle(place, Err(error));
                        continue;
                    }
                }
            }
            let topic = match &self.call.topics[place] {
                Ok(topic) => topic,
                Err(error) => {
                    self.settle(place, Err(again(error)));
                    continue;
                }
            };
            if let Some(error) = self.call.wrong.get(topic) {
                self.settle(place, Err(again(error)));
                continue;
            }
            let record = &self.call.records[place];
            let message = self.sink.encoder.encode(record);
            let letter = self.sink.letter(record, topic, &message);
            match self.link.send_for(letter, Ticket::new(place, self.tell.clone())) {
                Ok(()) => {
                    let waiting = Waiting { link: Arc::clone(&self.link), answered: false };
                    self.waiting[place] = Some(waiting);
                    self.sent += 1;
                    self.due.push_back((Instant::now() + self.sink.timeout + GRACE, place));
                }
                Err(Code::QueueFull) if Instant::now() < self.call.until => {
                    self.ready.push_front(place);
                    return true;
                }
                Err(code) => {
                    let link = Arc::clone(&self.link);
                    self.refused.push(Refused { place, link, code });
                }
            }
        }
        false
    }

    /// An event was answered. One whose time was over is not waited for any more.
    fn hear(&mut self, place: usize, answer: Answer) {
        let Some(mut waiting) = self.waiting[place].take() else { return };
        self.sent -= 1;
        waiting.answered = true;
        match answer {
            Ok(()) => self.settle(place, Ok(())),
            Err(code) => {
                let link = Arc::clone(&waiting.link);
                self.refused.push(Refused { place, link, code });
            }
        }
    }

    /// It is known what became of an event: the next of its key may follow.
    fn settle(&mut self, place: usize, judged: Result<()>) {
        self.outcomes[place] = Some(match judged {
            Ok(()) => {
                let may_send = || Instant::now() < self.call.until;
                self.ready.extend(self.next[place].filter(|_| may_send()));
                Outcome::Confirmed
            }
            Err(error) => Outcome::Failed(error),
        });
    }

    /// When the next answer is overdue.
    fn due(&mut self) -> Option<Instant> {
        while let Some((at, place)) = self.due.front() {
            if self.waiting[*place].is_some() {
                return Some(*at);
            }
            self.due.pop_front();
        }
        None
    }

    /// Waits no longer for what is overdue; its producer is not used again.
    fn give_up(&mut self, now: Instant) {
        while self.due().is_some_and(|at| at <= now) {
            let Some((_, place)) = self.due.pop_front() else { return };
            let Some(waiting) = self.waiting[place].take() else { return };
            self.sent -= 1;
            let link = Arc::clone(&waiting.link);
            self.refused.push(Refused { place, link, code: Code::MessageTimedOut });
        }
    }

    fn outcomes(self) -> Vec<Outcome> {
        self.outcomes.into_iter().map(|outcome| outcome.unwrap_or(Outcome::HeldBack)).collect()
    }
}
