//! Log lines on standard error, and traces to a collector.
//!
//! What lives here: the subscriber, made once. What does not: what is logged.
//! Invariant: logs never go to standard output, which belongs to the command's answer.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::config::{LogConfig, TraceConfig};
use crate::exit::Usage;
use crate::output::colors_wanted;

/// Overrides the level that the configuration or the command chose.
const LEVEL_VARIABLE: &str = "POSTRIDER_LOG";

/// Keeps the exporter alive; sends what is left when told to.
pub(crate) struct Tracing {
    #[cfg(feature = "otlp")]
    provider: Option<opentelemetry_sdk::trace::SdkTracerProvider>,
}

impl Tracing {
    /// Sends the spans that are still here. Blocks for a few seconds at most.
    pub(crate) fn finish(self) {
        #[cfg(feature = "otlp")]
        if let Some(provider) = self.provider
            && let Err(error) = provider.shutdown()
        {
            tracing::warn!(%error, "the last traces may be lost");
        }
    }
}

/// What a command without a configuration file of its own logs: warnings.
pub(crate) fn quiet() -> LogConfig {
    LogConfig { json: false, level: "warn".to_owned() }
}

/// Sets the process up to log and trace. Call once.
///
/// # Errors
/// When `POSTRIDER_LOG` is no level, or the exporter can't be made.
pub(crate) fn start(log: &LogConfig, trace: Option<&TraceConfig>) -> Result<Tracing> {
    let directives = match std::env::var(LEVEL_VARIABLE) {
        Ok(text) if !text.is_empty() => text,
        Ok(_) | Err(_) => log.level.clone(),
    };
    let filter = EnvFilter::builder().parse(&directives).map_err(|error| {
        Usage(format!("log level {directives:?} is not usable: {error}; write error to trace"))
    })?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines: Box<dyn Layer<Registry> + Send + Sync> = if log.json {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
    } else {
        let color = colors_wanted() && std::io::stderr().is_terminal();
        lines.with_ansi(color).with_target(false).boxed()
    };
    let registry = tracing_subscriber::registry().with(lines.with_filter(filter));
    #[cfg(feature = "otlp")]
    {
        let (layer, provider) = match trace.and_then(|trace| Some((trace, trace.otlp.as_ref()?))) {
            Some((trace, url)) => {
                let (layer, provider) = otlp::layer(trace, url)?;
                (Some(layer), Some(provider))
            }
            None => (None, None),
        };
        registry.with(layer).try_init().context("set up logging")?;
        Ok(Tracing { provider })
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = trace;
        registry.try_init().context("set up logging")?;
        Ok(Tracing {})
    }
}

#[cfg(feature = "otlp")]
mod otlp {
    use anyhow::{Context, Result};
    use opentelemetry::trace::TracerProvider;
    use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
    use tracing_subscriber::Layer;
    use tracing_subscriber::filter::LevelFilter;
    use tracing_subscriber::registry::LookupSpan;

    use crate::config::TraceConfig;

    /// Spans as OTLP: the exporter runs on a thread of its own and never holds up the relay.
    pub(super) fn layer<S>(
        trace: &TraceConfig,
        url: &str,
    ) -> Result<(impl Layer<S> + Send + Sync + use<S>, SdkTracerProvider)>
    where
        S: tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    {
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(url)
            .build()
            .context("make the OTLP exporter")?;
        let resource = Resource::builder().with_service_name(trace.service_name.clone()).build();
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(trace.sample)));
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource)
            .with_sampler(sampler)
            .build();
        let tracer = provider.tracer("postrider");
        let layer = tracing_opentelemetry::layer().with_tracer(tracer);
        Ok((layer.with_filter(LevelFilter::INFO), provider))
    }
}
