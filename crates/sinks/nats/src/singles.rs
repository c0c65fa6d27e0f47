//! Events that are their keys' only ones in a call.
//!
//! What lives here: sending them one after the other, and waiting for their answers in turn, at a
//! fraction of what a task for each costs. What does not: keys with several (`publish.rs`).
//! Invariant: nobody waits behind such an event but the call itself; and no call waits for places
//! while it holds some whose answers it could hear.

use std::collections::VecDeque;
use std::pin::{Pin, pin};

use async_nats::jetstream::context::{PublishAckFuture, PublishError};
use async_nats::jetstream::publish::PublishAck;
use futures_util::FutureExt;
use postrider_core::{Outcome, Record, Result};
use tokio::sync::SemaphorePermit;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::connect::Link;
use crate::publish::{Nats, Settled, crowded, lost, outcome};

/// An event that has left, and what is known of it.
struct Sent<'a> {
    place: usize,
    subject: String,
    in_time: Instant,
    answer: <PublishAckFuture as IntoFuture>::IntoFuture,
    _permit: SemaphorePermit<'a>,
}

/// What comes of waiting for an acknowledgement.
pub(crate) type Answer = Result<Result<PublishAck, PublishError>, Elapsed>;

/// The end of the connection, for many waits.
pub(crate) struct End<'a, D> {
    down: Pin<&'a mut D>,
    came: bool,
}

impl<'a, D: Future<Output = ()>> End<'a, D> {
    pub(crate) fn of(down: Pin<&'a mut D>) -> Self {
        Self { down, came: false }
    }

    /// What comes of a wait; None if the connection ended before.
    pub(crate) async fn or<T>(&mut self, wait: impl Future<Output = T>) -> Option<T> {
        if self.came {
            return wait.now_or_never();
        }
        tokio::select! {
            biased;
            came = wait => Some(came),
            () = &mut self.down => {
                self.came = true;
                None
            }
        }
    }
}

impl Nats {
    /// Sends events of which each is its key's only one in the call: nobody waits behind them, so
    /// that they leave one after the other, and their answers are waited for in turn.
    pub(crate) async fn singles(
        &self,
        link: &Link,
        records: &[Record],
        places: Vec<usize>,
        until: Instant,
    ) -> Vec<Settled> {
        let mut settled = Vec::with_capacity(places.len());
        let mut sent: VecDeque<Sent<'_>> = VecDeque::with_capacity(places.len());
        let down = pin!(link.down());
        let mut end = End::of(down);
        for place in places {
            let Some(record) = records.get(place) else { continue };
            let permit = loop {
                if let Ok(permit) = self.under_way.try_acquire() {
                    break Some(permit);
                }
                // What it has itself under way is heard meanwhile: two calls must not wait for each
                // other's places.
                let Some(first) = sent.front_mut() else {
                    let permit = timeout_at(until, self.under_way.acquire()).await;
                    break permit.ok().and_then(Result::ok);
                };
                let answer = timeout_at(first.in_time, &mut first.answer);
                tokio::select! {
                    biased;
                    () = sleep_until(until) => break None,
                    permit = self.under_way.acquire() => break permit.ok(),
                    answer = end.or(answer) => {
                        if let Some(first) = sent.pop_front() {
                            settled.push(self.heard(link, first, answer).await);
                        }
                    }
                }
            };
            let leaves = match permit {
                Some(permit) => self.leave(link, record, place, permit, &mut end).await,
                None => Err(crowded()),
            };
            match leaves {
                Ok(one) => sent.push_back(one),
                Err(error) => settled.push((place, Outcome::Failed(error))),
            }
        }
        for mut one in sent {
            let answer = end.or(timeout_at(one.in_time, &mut one.answer)).await;
            settled.push(self.heard(link, one, answer).await);
        }
        settled
    }

    /// Hands one event to the client library.
    async fn leave<'a>(
        &self,
        link: &Link,
        record: &Record,
        place: usize,
        permit: SemaphorePermit<'a>,
        end: &mut End<'_, impl Future<Output = ()>>,
    ) -> Result<Sent<'a>> {
        let (subject, publish) = self.message(link, record)?;
        let in_time = Instant::now() + self.timeout;
        let left = link.context().send_publish(subject.clone(), publish);
        match end.or(timeout_at(in_time, left)).await {
            None => Err(lost(link)),
            Some(Ok(Ok(answer))) => {
                Ok(Sent { place, subject, in_time, answer: answer.into_future(), _permit: permit })
            }
            Some(Ok(Err(error))) => Err(self.failure(link, Some(error), &subject).await),
            Some(Err(_)) => Err(self.failure(link, None, &subject).await),
        }
    }

    /// What came of waiting for the answer of one event.
    async fn heard(&self, link: &Link, sent: Sent<'_>, answer: Option<Answer>) -> Settled {
        let judged = match answer {
            Some(answer) => self.judge(link, answer, &sent.subject).await,
            None => Err(lost(link)),
        };
        (sent.place, outcome(judged))
    }
}
