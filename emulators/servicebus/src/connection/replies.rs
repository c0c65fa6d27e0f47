//! Answers to requests, on their way back.
//!
//! What lives here: finding the link that an answer belongs to, and the queue of each such link.
//! What does not: the answers (`cbs.rs`, `management/`).
//! Invariant: an answer goes to a link of the same connection and the same node; one that nobody
//! can take is dropped.

use std::collections::VecDeque;

use bytes::Bytes;

use super::session::{Node, Session};

/// How many answers wait for credit on one link. A client has asked for each.
const ANSWERS_MAX: usize = 64;

/// An answer to a request.
#[derive(Debug)]
pub(crate) struct Reply {
    /// The entity whose node was asked; none for tokens.
    pub node: Option<String>,
    /// Where the client wants to have it, if it says.
    pub reply_to: Option<String>,
    pub bytes: Bytes,
}

/// A link on which answers go out.
#[derive(Debug)]
pub(super) struct Answers {
    node: Option<String>,
    address: String,
    waiting: VecDeque<Bytes>,
}

impl Answers {
    pub(super) fn new(node: Option<String>, address: String) -> Self {
        Self { node, address, waiting: VecDeque::new() }
    }

    pub(super) fn pop(&mut self) -> Option<Bytes> {
        self.waiting.pop_front()
    }
}

/// Gives an answer to its link: the one whose address the request named, or else the newest.
pub(super) fn enqueue<'a>(sessions: impl Iterator<Item = &'a mut Session>, reply: Reply) {
    let mut best: Option<(bool, u64, &mut Answers)> = None;
    for session in sessions {
        for link in session.links.values_mut() {
            let Node::Answers(answers) = &mut link.node else { continue };
            if answers.node != reply.node || answers.waiting.len() >= ANSWERS_MAX {
                continue;
            }
            let named = reply.reply_to.as_ref().is_some_and(|to| *to == answers.address);
            if best.as_ref().is_none_or(|(best, id, _)| (*best, *id) < (named, link.id)) {
                best = Some((named, link.id, answers));
            }
        }
    }
    if let Some((_, _, answers)) = best {
        answers.waiting.push_back(reply.bytes);
    }
}
