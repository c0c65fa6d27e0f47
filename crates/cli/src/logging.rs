//! Log lines on standard error, and traces to a collector.
//!
//! What lives here: the subscriber, made once. What does not: what is logged.
//! Invariant: logs never go to standard output, which belongs to the command's answer.

use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::{Context, Result};
use postrider_core::Sink;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::config::{LogConfig, TraceConfig, nearest};
use crate::exit::Usage;
#[cfg(feature = "otlp")]
use crate::otlp;
use crate::output::colors_wanted;

/// Overrides the level that the configuration or the command chose.
const LEVEL_VARIABLE: &str = "POSTRIDER_LOG";

/// Makers' own libraries that tell of what is their affair: how their names begin, and what is
/// heard of them. NATS's tells as an error of each attempt at what its caller tries again, and
/// tells it to its caller as well.
const OTHERS: [(&str, &str); 3] = [("azure", "warn"), ("typespec", "warn"), ("async_nats", "off")];

/// Keeps the exporter alive; sends what is left when told to.
pub(crate) struct Tracing {
    #[cfg(feature = "otlp")]
    provider: Option<opentelemetry_sdk::trace::SdkTracerProvider>,
}

impl Tracing {
    /// The sink itself, or one that records its deliveries when traces are exported.
    pub(crate) fn traced(&self, name: &str, sink: Arc<dyn Sink>) -> Arc<dyn Sink> {
        #[cfg(feature = "otlp")]
        if let Some(provider) = &self.provider {
            return Arc::new(otlp::Traced::new(sink, name, provider));
        }
        let _ = name;
        sink
    }

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

/// Refuses what is no level and no list of directives. A bare word that is no level would be taken
/// for a module's name, and everything else would fall silent.
///
/// # Errors
/// What is wrong and what to write.
pub(crate) fn check_level(text: &str) -> Result<(), String> {
    const LEVELS: &[&str] = &["off", "error", "warn", "info", "debug", "trace"];
    let remedy = "write error, warn, info, debug or trace, or directives such as \
                  info,postrider_relay=debug";
    for part in text.split(',').map(str::trim).filter(|part| !part.contains(['=', '['])) {
        if !LEVELS.contains(&part.to_ascii_lowercase().as_str()) {
            let meant = nearest(part, LEVELS.iter().copied());
            let meant = meant.map(|name| format!("; did you mean {name:?}?")).unwrap_or_default();
            return Err(format!("{part:?} is no log level{meant}; {remedy}"));
        }
    }
    let parsed = EnvFilter::builder().parse(text);
    parsed.map(drop).map_err(|error| format!("{text:?} is no log level: {error}; {remedy}"))
}

/// The same with others' libraries as in [`OTHERS`], unless it names them.
fn with_others(directives: &str) -> String {
    let parts: Vec<&str> = directives.split(',').map(str::trim).collect();
    let told = |part: &&str| ["info", "debug", "trace"].contains(&&*part.to_ascii_lowercase());
    let tells_more = parts.iter().any(told);
    let mut whole = directives.to_owned();
    for (other, level) in OTHERS {
        let is_named = parts.iter().any(|part| part.starts_with(other));
        if !is_named && (level == "off" || tells_more) {
            whole += &format!(",{other}={level}");
        }
    }
    whole
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
    check_level(&directives).map_err(|text| Usage(format!("{LEVEL_VARIABLE}: {text}")))?;
    let directives = with_others(&directives);
    let filter = EnvFilter::builder().parse(&directives).context("read the log level")?;
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
        use opentelemetry::trace::TracerProvider as _;
        use tracing_subscriber::filter::LevelFilter;

        let export = trace.and_then(|trace| Some((trace, trace.otlp.as_ref()?)));
        let provider = export.map(|(trace, url)| otlp::provider(trace, url)).transpose()?;
        let layer = provider.as_ref().map(|provider| {
            let tracer = provider.tracer("postrider");
            let layer = tracing_opentelemetry::layer().with_tracer(tracer);
            layer.with_filter(LevelFilter::INFO)
        });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_heard_as_little_as_may_be_unless_they_are_named() {
        for (asked, added) in [
            ("info", ",azure=warn,typespec=warn,async_nats=off"),
            ("DEBUG,postrider_relay=trace", ",azure=warn,typespec=warn,async_nats=off"),
            ("info,azure_data_cosmos=info", ",typespec=warn,async_nats=off"),
            ("info,async_nats=debug", ",azure=warn,typespec=warn"),
            ("warn", ",async_nats=off"),
            ("error", ",async_nats=off"),
            ("postrider_relay=debug", ",async_nats=off"),
        ] {
            assert_eq!(with_others(asked), format!("{asked}{added}"));
            check_level(&with_others(asked)).expect("directives");
        }
    }
}
