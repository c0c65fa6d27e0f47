//! The shared sink suite, against an old and a new server.
//!
//! What lives here: the harness. What does not: behaviours.
//! Invariant: what was delivered is read from the server's stream.

use std::sync::Arc;

use async_nats::jetstream;
use async_trait::async_trait;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{EventId, Secret, Sink};
use postrider_servers::nats::{Nats as Server, Version};
use postrider_sink_nats::{Nats, NatsConfig};

use crate::middle::Middle;
use crate::{STREAM, config, everything, server, sink, stored};

const SETTINGS: &str = "max_payload: 8MB\nauthorization { token: s3cret-t0ken }";

struct Harness {
    context: jetstream::Context,
    middle: Middle,
    config: NatsConfig,
    sink: Arc<Nats>,
    _server: Server,
}

impl Harness {
    async fn on(version: Version) -> Self {
        let server = server(version, SETTINGS).await;
        let client = async_nats::ConnectOptions::with_token("s3cret-t0ken".into());
        let client = client.connect(server.url()).await.expect("the server answers");
        let context = jetstream::new(client);
        context.create_stream(everything()).await.expect("a stream");
        let middle = Middle::before(server.address()).await;
        let config = NatsConfig {
            token: Some(Secret::new("s3cret-t0ken")),
            stream: Some(STREAM.into()),
            ..config(middle.url())
        };
        let sink = sink(&config);
        Self { context, middle, config, sink, _server: server }
    }
}

macro_rules! harness {
    ($name:ident, $version:expr) => {
        struct $name(Harness);

        #[async_trait]
        impl SinkHarness for $name {
            async fn fresh() -> Self {
                Self(Harness::on($version).await)
            }
            fn sink(&self) -> Arc<dyn Sink> {
                self.0.sink.clone()
            }
            async fn delivered(&self) -> Vec<Delivered> {
                stored(&self.0.context).await
            }
            /// A stream that is full names no wait.
            fn can(&self, fault: ReceiverFault) -> bool {
                !matches!(fault, ReceiverFault::Throttling { .. })
            }
            async fn fail_next(&self, times: u32, fault: ReceiverFault) {
                self.0.middle.orders().next = Some((times, fault));
            }
            async fn fail_event(&self, id: EventId, fault: ReceiverFault) {
                self.0.middle.orders().poisoned.insert(id, fault);
            }
            fn can_hold(&self) -> bool {
                true
            }
            async fn hold(&self) {
                self.0.middle.hold(true);
            }
            async fn release(&self) {
                self.0.middle.hold(false);
            }
            async fn is_waiting(&self) -> bool {
                self.0.middle.orders().waiting
            }
            fn secrets(&self) -> Vec<String> {
                vec!["s3cret-t0ken".into()]
            }
            fn printed(&self) -> String {
                format!("{:?} {:?}", self.0.sink, self.0.config)
            }
        }
    };
}

mod old {
    use super::*;
    harness!(OldServer, Version::Old);
    postrider_conformance::sink_suite!(OldServer);
}

mod new {
    use super::*;
    harness!(NewServer, Version::New);
    postrider_conformance::sink_suite!(NewServer);
}
