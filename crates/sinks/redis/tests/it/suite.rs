//! The shared sink suite.
//!
//! What lives here: the harness. What does not: behaviours.
//! Invariant: what was delivered is read from the server's stream.

use std::sync::Arc;

use async_trait::async_trait;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{EventId, Secret, Sink};
use postrider_servers::redis::Redis as Server;
use postrider_sink_redis::{Redis, RedisConfig, Unroutable};
use redis::aio::MultiplexedConnection;

use crate::middle::Middle;
use crate::{STREAM, admin, config, run, server, sink, stored};

const PASSWORD: &str = "s3cret-p4ss";

struct Harness {
    admin: MultiplexedConnection,
    middle: Middle,
    config: RedisConfig,
    sink: Arc<Redis>,
    _server: Server,
}

#[async_trait]
impl SinkHarness for Harness {
    async fn fresh() -> Self {
        let server = server(&format!("requirepass {PASSWORD}")).await;
        let url = server.url().replace("//", &format!("//:{PASSWORD}@"));
        let mut admin = admin(&url).await;
        run(&mut admin, &format!("XGROUP CREATE {STREAM} readers $ MKSTREAM")).await;
        let middle = Middle::before(server.address()).await;
        let config = RedisConfig {
            password: Some(Secret::new(PASSWORD)),
            // So that an event whose stream he changes is refused for good.
            stream: STREAM.into(),
            create_streams: false,
            unroutable: Unroutable::Park,
            ..config(middle.url())
        };
        let sink = sink(&config);
        Self { admin, middle, config, sink, _server: server }
    }

    fn sink(&self) -> Arc<dyn Sink> {
        self.sink.clone()
    }

    async fn delivered(&self) -> Vec<Delivered> {
        stored(&self.admin).await
    }

    /// A server that is out of memory names no wait.
    fn can(&self, fault: ReceiverFault) -> bool {
        !matches!(fault, ReceiverFault::Throttling { .. })
    }

    async fn fail_next(&self, times: u32, fault: ReceiverFault) {
        self.middle.orders().next = Some((times, fault));
    }

    async fn fail_event(&self, id: EventId, fault: ReceiverFault) {
        self.middle.orders().poisoned.insert(id, fault);
    }

    fn can_hold(&self) -> bool {
        true
    }

    async fn hold(&self) {
        self.middle.hold(true);
    }

    async fn release(&self) {
        self.middle.hold(false);
    }

    async fn is_waiting(&self) -> bool {
        self.middle.orders().waiting
    }

    fn secrets(&self) -> Vec<String> {
        vec![PASSWORD.into()]
    }

    fn printed(&self) -> String {
        format!("{:?} {:?}", self.sink, self.config)
    }
}

postrider_conformance::sink_suite!(Harness);
