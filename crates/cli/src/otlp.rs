//! Traces to an OpenTelemetry collector, by OTLP over HTTP.
//!
//! What lives here: the exporter, and a sink that records each delivery as a span of the trace in
//! which its event was appended. What does not: logs, and the trace headers that travel with an
//! event, which every sink passes on as they are.
//! Invariant: a collector that is slow or gone costs traces, never a delivery; spans hold neither
//! payloads nor keys.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId,
    TraceState, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, Span};
use postrider_core::{Capabilities, Outcome, Publish, Record, Sink, TraceContext};

use crate::config::TraceConfig;

/// The exporter's provider; a thread of its own sends batches.
///
/// # Errors
/// When the address or the sampling is not usable.
pub(crate) fn provider(trace: &TraceConfig, url: &str) -> Result<SdkTracerProvider> {
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(url)
        .build()
        .context("make the OTLP exporter")?;
    let resource = Resource::builder().with_service_name(trace.service_name.clone()).build();
    let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(trace.sample)));
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource)
        .with_sampler(sampler)
        .build())
}

/// A sink whose deliveries are spans.
pub(crate) struct Traced {
    sink: Arc<dyn Sink>,
    name: String,
    tracer: SdkTracer,
}

impl Traced {
    /// Records what `sink`, called `name`, delivers.
    pub(crate) fn new(sink: Arc<dyn Sink>, name: &str, provider: &SdkTracerProvider) -> Self {
        Self { sink, name: name.to_owned(), tracer: provider.tracer("postrider") }
    }

    /// The span of one delivery; events that were appended outside a trace have none.
    fn span(&self, batch: &Publish<'_>, record: &Record) -> Option<Span> {
        let parent = remote(&record.event.trace()?)?;
        let event = &record.event;
        let builder = self
            .tracer
            .span_builder(format!("send {}", event.topic()))
            .with_kind(SpanKind::Producer)
            .with_attributes([
                KeyValue::new("messaging.system", "postrider"),
                KeyValue::new("messaging.operation.type", "send"),
                KeyValue::new("messaging.destination.name", event.topic().to_string()),
                KeyValue::new("messaging.message.id", event.id().to_string()),
                KeyValue::new("postrider.sink", self.name.clone()),
                KeyValue::new("postrider.partition", batch.partition().to_string()),
                KeyValue::new("postrider.position", record.position.to_string()),
            ]);
        Some(self.tracer.build_with_context(builder, &parent))
    }
}

/// The caller's span, as the parent of ours.
fn remote(trace: &TraceContext) -> Option<Context> {
    let mut parts = trace.traceparent.split('-').skip(1);
    let trace_id = TraceId::from_hex(parts.next()?).ok()?;
    let span_id = SpanId::from_hex(parts.next()?).ok()?;
    let flags = TraceFlags::new(u8::from_str_radix(parts.next()?, 16).ok()?);
    // Vendors' additions that are no valid tracestate are left out; the trace goes on without.
    let state = trace.tracestate.as_deref().unwrap_or_default();
    let state = state.parse::<TraceState>().unwrap_or_default();
    let parent = SpanContext::new(trace_id, span_id, flags, true, state);
    parent.is_valid().then(|| Context::new().with_remote_span_context(parent))
}

#[async_trait]
impl Sink for Traced {
    fn capabilities(&self) -> Capabilities {
        self.sink.capabilities()
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let mut spans: Vec<_> =
            batch.records().iter().map(|record| self.span(&batch, record)).collect();
        let outcomes = self.sink.publish(batch).await;
        for (span, outcome) in spans.iter_mut().zip(&outcomes) {
            let Some(span) = span else { continue };
            match outcome {
                Outcome::Confirmed | Outcome::Duplicate => span.set_status(Status::Ok),
                Outcome::Failed(error) => span.set_status(Status::error(error.chain())),
                Outcome::HeldBack => {
                    span.set_status(Status::error("held back behind an earlier event of its key"));
                }
            }
            span.end();
        }
        outcomes
    }

    async fn check(&self) -> postrider_core::Result<()> {
        self.sink.check().await
    }

    async fn close(&self) -> postrider_core::Result<()> {
        self.sink.close().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_taken_from_well_formed_headers_alone() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let trace = TraceContext::new(good, Some("no = valid,,state".to_owned())).expect("valid");
        let parent = remote(&trace).expect("a parent");
        let span = parent.span().span_context().clone();
        assert_eq!(span.trace_id().to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(span.is_sampled() && span.is_remote());
        let zero = "00-00000000000000000000000000000000-00f067aa0ba902b7-01";
        assert!(remote(&TraceContext::new(zero, None).expect("of the form")).is_none());
    }
}
