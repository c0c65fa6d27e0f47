//! The guide's example line is one that the sink writes.
//!
//! What lives here: docs/sinks/jsonl.md against the line format. What does not: other guides.
//! Invariant: the example is parsed with every member known and none missing.

use crate::Line;

const GUIDE: &str = include_str!("../../../../../docs/sinks/jsonl.md");

#[test]
fn the_example_line_of_the_guide_has_exactly_the_members_of_a_line() {
    let (_, rest) = GUIDE.split_once("```json\n").expect("the guide shows a line");
    let (line, _) = rest.split_once("\n```").expect("its end");
    let line: Line = serde_json::from_str(line).expect("a line");
    assert_eq!(line.payload(), b"{\"total\": 1.0}");
}
