//! Every word that the architecture rests on has its meaning in GLOSSARY.md.
//!
//! What lives here: the list of words. What does not: their meanings.
//! Invariant: one word, one meaning; a word that is dropped here must be dropped in the code first.

use super::Finding;
use crate::workspace::TextFile;

const WORDS: &[&str] = &[
    "event",
    "outbox",
    "key",
    "topic",
    "feed",
    "partition",
    "position",
    "record",
    "source",
    "sink",
    "relay",
    "lane",
    "lease",
    "epoch",
    "checkpoint",
    "confirm",
    "park",
    "dead letter",
    "requeue",
    "inbox",
    "lag",
    "prune",
    "drain",
    "tick",
    "slot",
    "publication",
    "LSN",
    "document",
    "ETag",
    "append",
    "read",
    "publish",
    "acquire",
    "renew",
    "release",
];

/// The glossary has a bold entry for each word.
pub(super) fn every_word(files: &[TextFile]) -> Vec<Finding> {
    let text = files.iter().find(|file| file.path == "GLOSSARY.md").map(|file| file.text.as_str());
    let text = text.unwrap_or_default();
    let missing = WORDS.iter().filter(|word| !text.contains(&format!("**{word}**")));
    missing
        .map(|word| {
            let remedy = format!("give **{word}** its one meaning");
            Finding::new("GLOSSARY.md", 1, "glossary", remedy)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn a_word_without_entry_is_found() {
        let all: String = WORDS.iter().map(|word| format!("**{word}** means.\n")).collect();
        assert!(every_word(&[sample("GLOSSARY.md", all.clone())]).is_empty());
        let without = all.replace("**lane**", "lane");
        assert_eq!(every_word(&[sample("GLOSSARY.md", without)]).len(), 1);
        assert_eq!(every_word(&[]).len(), WORDS.len());
    }
}
