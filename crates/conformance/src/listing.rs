//! The macro that lists one test for each behaviour, and the check that none is left out.
//!
//! What lives here: the expansion that all three suites share. What does not: the lists.
//! Invariant: a behaviour that no macro lists fails a test here.

/// Expands to one `#[tokio::test]` for each behaviour; for the suites' macros alone.
#[doc(hidden)]
#[macro_export]
macro_rules! listed_tests {
    ($suite:ident, $module:ident, $harness:ty; $($area:ident: $($name:ident)+;)+) => {
        mod $suite {
            #[allow(unused_imports, reason = "a harness given by a full path needs none")]
            use super::*;
            $(
                mod $area {
                    #[allow(unused_imports, reason = "as above")]
                    use super::*;
                    $(
                        #[tokio::test]
                        async fn $name() {
                            $crate::$module::$area::$name::<$harness>().await;
                        }
                    )+
                }
            )+
        }
    };
}

#[cfg(test)]
mod tests {
    /// The names of the public behaviours in a source text.
    fn behaviours(source: &str) -> Vec<&str> {
        let after = source.split("\npub async fn ").skip(1);
        after.filter_map(|rest| rest.split_once('<').map(|(name, _)| name)).collect()
    }

    fn assert_listed(macro_source: &str, area: &str, source: &str) {
        let (_, list) = macro_source.split_once("listed_tests! {").expect("the suite has a list");
        let (_, list) = list.split_once(&format!("{area}:\n")).expect("the area is listed");
        let (list, _) = list.split_once(';').expect("a list ends");
        let listed: Vec<&str> = list.split_whitespace().collect();
        assert_eq!(listed, behaviours(source), "{area}");
        assert!(!listed.is_empty(), "{area} has behaviours");
    }

    #[test]
    fn every_behaviour_is_listed_by_its_suite_in_the_order_of_its_file() {
        let store = include_str!("store/mod.rs");
        for (area, source) in [
            ("append", include_str!("store/append.rs")),
            ("feed", include_str!("store/feed.rs")),
            ("leases", include_str!("store/leases.rs")),
            ("fencing", include_str!("store/fencing.rs")),
            ("checkpoints", include_str!("store/checkpoints.rs")),
            ("dead_letters", include_str!("store/dead_letters.rs")),
            ("retention", include_str!("store/retention.rs")),
            ("partitions", include_str!("store/partitions.rs")),
            ("documents", include_str!("store/documents.rs")),
        ] {
            assert_listed(store, area, source);
        }
        let source = include_str!("source/mod.rs");
        assert_listed(source, "reading", include_str!("source/reading.rs"));
        let sink = include_str!("sink/mod.rs");
        assert_listed(sink, "delivery", include_str!("sink/delivery.rs"));
        assert_listed(sink, "failures", include_str!("sink/failures.rs"));
    }
}
