//! Waiting on a thread that may block, for what is told by others.
//!
//! What lives here: the wait. What does not: what is waited for (`transact.rs`).
//! Invariant: it needs no runtime. One that ends while a thread of its own still waits has no clock
//! any more, and whoever asks that clock panics.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What comes of it within `limit`; none if it takes longer. Blocks.
pub(crate) fn wait_for<T>(limit: Duration, told: impl Future<Output = T>) -> Option<T> {
    let until = Instant::now() + limit;
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let (mut context, mut told) = (Context::from_waker(&waker), pin!(told));
    loop {
        if let Poll::Ready(what) = told.as_mut().poll(&mut context) {
            return Some(what);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        thread::park_timeout(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use tokio::sync::oneshot;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn it_is_told_what_comes_and_waits_no_longer_than_it_may() {
        let (teller, told) = oneshot::channel();
        let thread = thread::spawn(move || wait_for(LONG, told));
        teller.send(7).expect("somebody waits");
        assert_eq!(thread.join().expect("no panic"), Some(Ok(7)));
        let (_teller, told) = oneshot::channel::<()>();
        assert_eq!(wait_for(Duration::from_millis(1), told), None);
    }

    #[test]
    fn a_runtime_that_ends_meanwhile_is_not_missed() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build();
        let runtime = runtime.expect("a runtime");
        let ((begun, begins), (done, ends)) = (mpsc::channel(), mpsc::channel());
        let (teller, told) = oneshot::channel();
        runtime.spawn_blocking(move || {
            begun.send(()).expect("somebody waits");
            done.send(wait_for(LONG, told))
        });
        begins.recv_timeout(LONG).expect("it began");
        runtime.shutdown_background();
        teller.send(7).expect("somebody waits");
        assert_eq!(ends.recv_timeout(LONG), Ok(Some(Ok(7))));
    }
}
