//! What operations cost, as a metric.
//!
//! What lives here: the counters after a commit. What does not: figures, which are the service's.
//! Invariant: a refused batch is counted as well.

use metrics_exporter_prometheus::PrometheusBuilder;

use super::world::{World, create, event};

#[tokio::test]
async fn every_operation_counts_with_what_it_cost() {
    let recorder = PrometheusBuilder::new().install_recorder().expect("one recorder a process");
    let world = World::new().await;
    world.save(create("1"), vec![event("A")]).await;
    let value = |metric: &str| {
        let text = recorder.render();
        let line = text.lines().find(|line| {
            line.starts_with(metric)
                && line.contains("operation=\"execute_batch\"")
                && line.contains("container=\"contacts\"")
        });
        let line = line.unwrap_or_else(|| panic!("no {metric} in {text}"));
        line.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok()).expect("a number")
    };
    assert_eq!(value("postrider_cosmos_requests_total"), 1);
    let first = value("postrider_cosmos_request_milliunits_total");
    assert!(first > 0);
    let refused = world.commit(vec![create("2")], vec![event("B")]).await;
    assert!(refused.is_err());
    assert_eq!(value("postrider_cosmos_requests_total"), 2);
    assert!(value("postrider_cosmos_request_milliunits_total") >= first);
}
