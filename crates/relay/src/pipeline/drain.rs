//! Stopping: what is under way is confirmed, and nothing confirmed is left beyond a gap.
//!
//! What lives here: a planned stop, a halt, and the end of a partition. What does not: losing the
//! lease, where nothing more may be done.
//! Invariant: after a planned stop the checkpoint covers every confirmed event, so that the next
//! relay repeats none.

use std::time::Duration;

use postrider_core::Error;

use super::{Exit, Phase, Pipeline};
use crate::lanes::{Item, Origin};
use crate::store_ops::StoreOp;

impl Pipeline {
    /// Stops reading. A halted sink sends nothing more; a planned stop fills the gaps first.
    pub(super) fn begin_drain(&mut self, halted: Option<Error>) {
        if matches!(self.phase, Phase::Draining { .. }) {
            return;
        }
        self.stop_reading();
        let until = self.set.desk.clock.elapsed() + self.set.drain_timeout;
        self.phase = Phase::Draining { until, halted };
    }

    /// Moves a drain on, and ends it when nothing is left to wait for.
    pub(super) fn drain_tick(&mut self, now: Duration) {
        let Phase::Draining { until, halted } = &mut self.phase else { return };
        let (until, is_halted) = (*until, halted.is_some());
        let high = self.window.high();
        let is_gap = |item: &Item| matches!(item.origin, Origin::Feed(seq) if seq < high);
        if !is_halted && now < until {
            // A lane between attempts would leave a gap below confirmed events, and so would one
            // that an open circuit keeps from being sent.
            if self.health.is_open() {
                self.lanes.make_ready_wait(is_gap);
            }
            for lane in self.lanes.waiting(is_gap) {
                self.set_aside(lane);
            }
        }
        let sending = !self.publishes.is_empty() || (!is_halted && self.lanes.any_ready(is_gap));
        let busy = sending || !self.ops.is_idle() || self.window.has_prefix();
        if busy && now < until {
            return;
        }
        if busy {
            tracing::warn!(
                partition = %self.partition(), sink = %self.set.desk.consumer,
                "the drain timed out; what was not confirmed is sent again by the next relay"
            );
        }
        let Phase::Draining { halted, .. } = &mut self.phase else { return };
        self.exit = Some(halted.take().map_or(Exit::Drained, Exit::Halted));
    }

    /// Finishes a partition that ended, once everything before its end is settled.
    pub(super) fn finish_tick(&mut self) {
        let settled = self.window.len() == 0 && !self.window.has_prefix() && self.ops.is_idle();
        let under_way = !self.publishes.is_empty() || self.lookup.is_some();
        if !settled || under_way || self.finishing || !matches!(self.phase, Phase::Running) {
            return;
        }
        if let Some(successors) = self.ended.take() {
            self.finishing = true;
            self.ops.push(StoreOp::Finish { successors });
        }
    }
}
