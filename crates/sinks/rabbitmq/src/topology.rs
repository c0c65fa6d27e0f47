//! The exchange and the queue that the settings name.
//!
//! What lives here: looking whether they exist, and making them where the settings say so. What
//! does not: anything that only whoever runs the broker decides: policies, users, limits.
//! Invariant: without `declare` nothing is ever made.

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, ExchangeKind};
use postrider_core::{Error, Result};
use postrider_encoding::Template;

use crate::config::{ExchangeType, QueueType, RabbitMqConfig};
use crate::connect::Link;
use crate::encode::short;
use crate::error::topology_error;

/// What has to be there.
pub(crate) struct Topology {
    /// None for the default exchange, and for one that each event names.
    exchange: Option<ShortString>,
    exchange_kind: ExchangeKind,
    queue: Option<ShortString>,
    queue_type: QueueType,
    binding_key: ShortString,
    declare: bool,
}

impl Topology {
    /// What the settings name; `exchange` is None for the default exchange.
    ///
    /// # Errors
    /// `Permanent` if something is to be declared that has no name of its own.
    pub(crate) fn new(config: &RabbitMqConfig, exchange: Option<&Template>) -> Result<Self> {
        let constant = exchange.and_then(Template::constant);
        if config.declare && exchange.is_some() && constant.is_none() {
            return Err(Error::permanent(
                "declare: the exchange has placeholders; make the exchanges yourself",
            ));
        }
        Ok(Self {
            exchange: constant.map(|name| short("exchange", name)).transpose()?,
            exchange_kind: match config.exchange_type {
                ExchangeType::Topic => ExchangeKind::Topic,
                ExchangeType::Direct => ExchangeKind::Direct,
                ExchangeType::Fanout => ExchangeKind::Fanout,
                ExchangeType::Headers => ExchangeKind::Headers,
            },
            queue: config.queue.as_deref().map(|name| short("queue", name)).transpose()?,
            queue_type: config.queue_type,
            binding_key: short("binding key", &config.binding_key)?,
            declare: config.declare,
        })
    }

    /// Whether anything is to be made.
    pub(crate) fn declares(&self) -> bool {
        self.declare
    }

    /// Looks whether exchange and queue are there; with `declare` makes them.
    ///
    /// # Errors
    /// `Transient`, naming the key.
    pub(crate) async fn settle(&self, link: &Link) -> Result<()> {
        let failed = |failure| topology_error(&failure, "a channel");
        if let Some(exchange) = &self.exchange {
            // A name that does not exist closes the channel: each has its own.
            let channel = link.fresh_channel().await.map_err(failed)?;
            self.exchange(&channel, exchange).await.map_err(|failure| {
                topology_error(&failure, &format!("exchange: {:?}", exchange.as_str()))
            })?;
        }
        if let Some(queue) = &self.queue {
            let channel = link.fresh_channel().await.map_err(failed)?;
            self.queue(&channel, queue).await.map_err(|failure| {
                topology_error(&failure, &format!("queue: {:?}", queue.as_str()))
            })?;
        }
        Ok(())
    }

    async fn exchange(&self, channel: &Channel, name: &ShortString) -> lapin::Result<()> {
        let passive = !self.declare;
        let options = ExchangeDeclareOptions { passive, durable: true, ..Default::default() };
        let kind = self.exchange_kind.clone();
        channel.exchange_declare(name.clone(), kind, options, FieldTable::default()).await
    }

    async fn queue(&self, channel: &Channel, name: &ShortString) -> lapin::Result<()> {
        let passive = !self.declare;
        let options = QueueDeclareOptions { passive, durable: true, ..Default::default() };
        let mut arguments = FieldTable::default();
        match self.queue_type {
            QueueType::Classic => {}
            QueueType::Quorum => {
                let quorum = AMQPValue::LongString("quorum".into());
                arguments.insert("x-queue-type".into(), quorum);
            }
        }
        channel.queue_declare(name.clone(), options, arguments).await?;
        if let (true, Some(exchange)) = (self.declare, &self.exchange) {
            let (key, options) = (self.binding_key.clone(), QueueBindOptions::default());
            let none = FieldTable::default();
            channel.queue_bind(name.clone(), exchange.clone(), key, options, none).await?;
        }
        Ok(())
    }
}
