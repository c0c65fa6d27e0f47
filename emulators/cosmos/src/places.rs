//! Places in the change feed that outlive a merge, as the service's do.
//!
//! What lives here: which range an etag is of, what became of that range, and the same place by the
//! numbers that documents have now. What does not: the merge itself, and pages, which are those of
//! Microsoft's emulator.
//! Invariant: the service keeps documents' numbers over a merge, and reads on in the part that a
//! place is of; the emulator numbers anew, so that a place is told by the document that it stands
//! after. Nothing that was written before a merge is skipped or repeated by reading on over it.

use std::collections::{BTreeMap, HashMap};

use azure_core::http::headers::HeaderName;
use azure_core::http::{Method, Request};
use serde::{Deserialize, Serialize};

use crate::request::{header, segments};
use crate::service::Service;

/// Which range a request names, and which one has answered.
pub(crate) const RANGE: &str = "x-ms-documentdb-partitionkeyrangeid";
const START: &str = "x-ms-start-epk";
const END: &str = "x-ms-end-epk";
pub(crate) const MOST: &str = "x-ms-max-item-count";
const BY_HASHES: (&str, &str) = ("x-ms-read-key-type", "EffectivePartitionKeyRange");
/// Where a client's place stands in its request.
const PLACES: [&str; 2] = ["if-none-match", "x-ms-continuation"];
/// Why a range is not merged.
const OUT_OF_ORDER: &str = "has documents whose seconds are not in the order of their numbers: the \
                            emulator would turn them round, which the service does not";
/// A range is listed by so many slices: each answer is made of all that its slice has.
const SLICES: u128 = 64;
/// One above the largest hash.
const HASHES: u128 = 1 << 126;

/// The emulator's etag of a page, and the range that gave it.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    kind: String,
    lsn: u64,
    epk: String,
    id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    range: Option<u32>,
}

impl Place {
    fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The place before everything that the place's range has.
    pub(crate) fn before_all(text: &str) -> Option<String> {
        let Self { kind, range, .. } = Self::read(text)?;
        Some(Self { kind, range, ..Self::default() }.text())
    }

    fn key(&self) -> (u64, &str, &str) {
        (self.lsn, &self.epk, &self.id)
    }
}

/// A document's place before a merge, and its number after it.
#[derive(Debug)]
struct Moved {
    place: Place,
    etag: String,
    /// When it was written.
    seconds: u64,
    number: u64,
}

/// A range and what it covers.
pub(crate) type Part = (u32, (String, String));

/// What became of a range.
#[derive(Debug)]
enum Fate {
    Split(Vec<Part>),
    Merged {
        into: u32,
        /// What it covered.
        bounds: (String, String),
        /// Its documents, in the order of its change feed.
        documents: Vec<Moved>,
    },
}

/// What became of a container's ranges.
#[derive(Debug, Default)]
pub(crate) struct Fates {
    fates: HashMap<u32, Fate>,
    /// Numbers from one to another that belong together, by range: batches that a merge has mixed.
    mixed: HashMap<u32, Vec<(u64, u64)>>,
}

/// What became of all containers' ranges: by database and container.
pub(crate) type History = HashMap<(String, String), Fates>;

/// A place that can't be read on from there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooWide;

impl Fates {
    pub(crate) fn split(&mut self, range: u32, into: Vec<Part>) {
        for (next, _) in &into {
            let mixed = self.mixed.get(&range).cloned().unwrap_or_default();
            self.mixed.insert(*next, mixed);
        }
        self.fates.insert(range, Fate::Split(into));
    }

    /// Notes which documents of merged ranges stand between those of one batch: what had one moment
    /// in both, and what was mixed before.
    fn mix(&mut self, into: u32, merged: &[Before]) {
        let mut groups: BTreeMap<(u64, u64), (u64, u64)> = BTreeMap::new();
        let mut all = Vec::new();
        for before in merged {
            for one in &before.documents {
                let group = groups.entry((one.seconds, one.place.lsn));
                let (from, to) = group.or_insert((one.number, one.number));
                (*from, *to) = ((*from).min(one.number), (*to).max(one.number));
            }
            for (from, to) in self.mixed.get(&before.range).into_iter().flatten() {
                let within = |one: &&Moved| (*from..=*to).contains(&one.place.lsn);
                let mut now = before.documents.iter().filter(within).map(|one| one.number);
                if let Some(first) = now.next() {
                    all.push((first, now.next_back().unwrap_or(first)));
                }
            }
        }
        all.extend(groups.into_values());
        all.sort_unstable();
        let mut mixed: Vec<(u64, u64)> = Vec::new();
        for (from, to) in all.into_iter().filter(|(from, to)| from < to) {
            match mixed.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => mixed.push((from, to)),
            }
        }
        self.mixed.insert(into, mixed);
    }

    /// Whether a page that ends there ends in the middle of a batch.
    fn cuts(&self, place: &Place) -> bool {
        let mixed = place.range.and_then(|range| self.mixed.get(&range));
        mixed.into_iter().flatten().any(|(from, to)| (*from..*to).contains(&place.lsn))
    }

    fn leads(&self, from: u32, to: u32) -> bool {
        from == to
            || match self.fates.get(&from) {
                None => false,
                Some(Fate::Split(into)) => into.iter().any(|(next, _)| self.leads(*next, to)),
                Some(Fate::Merged { into, .. }) => self.leads(*into, to),
            }
    }

    /// The same place in the range `to`, of which hashes within `scope` are asked for. A place of a
    /// range that did not become that one is left as it is.
    fn follow(&self, place: &mut Place, to: u32, scope: (&str, &str)) -> Result<(), TooWide> {
        if let Some(from) = place.range.filter(|from| self.leads(*from, to)) {
            *place = self.follow_on(place.clone(), from, to, scope)?;
        }
        Ok(())
    }

    fn follow_on(
        &self,
        place: Place,
        at: u32,
        to: u32,
        scope: (&str, &str),
    ) -> Result<Place, TooWide> {
        match self.fates.get(&at).filter(|_| at != to) {
            None => Ok(place),
            // Both parts, if they were merged again and both are asked for: what was read of either
            // was read before anything that was not.
            Some(Fate::Split(into)) => {
                let mut last = None;
                for (next, bounds) in into.iter().filter(|(next, _)| self.leads(*next, to)) {
                    let from = scope.0.max(&bounds.0);
                    let end = scope.1.min(&bounds.1);
                    if from < end {
                        let found = self.follow_on(place.clone(), *next, to, (from, end))?;
                        let is_later = |last: &Place| found.key() > last.key();
                        last = if last.as_ref().is_none_or(is_later) { Some(found) } else { last };
                    }
                }
                last.ok_or(TooWide)
            }
            Some(Fate::Merged { into, bounds, documents }) => {
                if scope.0 < bounds.0.as_str() || scope.1 > bounds.1.as_str() {
                    return Err(TooWide);
                }
                let passed = documents.partition_point(|one| one.place.key() <= place.key());
                let kind = place.kind;
                let place = match documents[..passed].last() {
                    None => Place { kind, ..Place::default() },
                    Some(last) => Place { kind, lsn: last.number, ..last.place.clone() },
                };
                self.follow_on(place, *into, to, scope)
            }
        }
    }
}

/// The database and the container of a path.
pub(crate) fn container_of(path: &str) -> Option<(String, String)> {
    match &segments(path)[..] {
        [dbs, database, colls, container, ..] if dbs == "dbs" && colls == "colls" => {
            Some((database.clone(), container.clone()))
        }
        _ => None,
    }
}

/// The request with its place as the emulator knows it now.
pub(crate) async fn translated(
    service: &Service,
    history: &History,
    request: &Request,
) -> Result<Option<Request>, TooWide> {
    let found = PLACES.iter().find_map(|name| Some((*name, Place::read(header(request, name)?)?)));
    let Some((name, mut place)) = found else { return Ok(None) };
    let path = request.url().path();
    let target = header(request, RANGE).and_then(|id| id.parse().ok());
    let fates = container_of(path).and_then(|container| history.get(&container));
    if let (Some(fates), Some(target)) = (fates, target) {
        // A range that is gone is told by the emulator.
        if let Some(scope) = scope(service, request, target).await {
            fates.follow(&mut place, target, (&scope.0, &scope.1))?;
        }
    }
    place.range = None;
    let mut request = request.clone();
    request.headers_mut().insert(HeaderName::from_static(name), place.text());
    Ok(Some(request))
}

/// The hashes that a request asks for; none of a range that is gone.
async fn scope(service: &Service, request: &Request, range: u32) -> Option<(String, String)> {
    let named = |name| header(request, name).map(str::to_owned);
    let (start, end) = (named(START), named(END));
    let whole = match container_of(request.url().path()) {
        Some((database, container)) => bounds(service, &database, &container, range).await,
        None => None,
    };
    let (from, to) = whole?;
    Some((start.unwrap_or(from), end.unwrap_or(to)))
}

/// The request for a page that has one document more, where a page would end within a batch: the
/// service gives the rest of a transaction beyond what was asked for.
pub(crate) fn grown(
    history: &History,
    request: &Request,
    (etag, count): (&str, u64),
) -> Option<Request> {
    let fates = history.get(&container_of(request.url().path())?)?;
    let most: u64 = header(request, MOST)?.parse().ok()?;
    // A page that is not full is the end of what is asked for.
    if count < most || !fates.cuts(&Place::read(etag)?) {
        return None;
    }
    let mut request = request.clone();
    request.headers_mut().insert(HeaderName::from_static(MOST), (most + 1).to_string());
    Some(request)
}

/// The etag of a page with its range in it.
pub(crate) fn tagged(etag: &str, range: Option<u32>) -> Option<String> {
    let mut place = Place::read(etag)?;
    place.range = Some(range?);
    Some(place.text())
}

/// What a range covers.
pub(crate) async fn bounds(
    service: &Service,
    database: &str,
    container: &str,
    range: u32,
) -> Option<(String, String)> {
    let path = format!("/dbs/{database}/colls/{container}/pkranges");
    let (_, found) = service.ask(Method::Get, &path, None).await.ok()?;
    let ranges = found["PartitionKeyRanges"].as_array()?;
    let id = range.to_string();
    let range = ranges.iter().find(|one| one["id"].as_str() == Some(id.as_str()))?;
    let end = |name: &str| range[name].as_str().map(str::to_owned);
    Some((end("minInclusive")?, end("maxExclusive")?))
}

/// A range before a merge: what it covers, and its documents by its numbers.
pub(crate) struct Before {
    range: u32,
    bounds: (String, String),
    documents: Vec<Moved>,
}

/// Lists a range that is about to be merged. Nobody may write meanwhile.
pub(crate) async fn before(
    service: &Service,
    database: &str,
    container: &str,
    range: u32,
) -> Result<Before, String> {
    let bounds = bounds(service, database, container, range).await;
    let bounds = bounds.ok_or_else(|| format!("there is no range {range}"))?;
    let path = format!("/dbs/{database}/colls/{container}/docs");
    let mut documents = Vec::new();
    for (from, to) in slices(&bounds) {
        let mut etag: Option<String> = None;
        loop {
            let mut headers = vec![(START, from.clone()), (END, to.clone())];
            headers.push((BY_HASHES.0, BY_HASHES.1.to_owned()));
            headers.extend([(RANGE, range.to_string()), (MOST, "1".to_owned())]);
            headers.extend(etag.clone().map(|etag| ("if-none-match", etag)));
            let Some((next, page)) = service.changes(&path, &headers).await? else { break };
            let place = Place::read(&next).ok_or("the emulator's etag is another one")?;
            let [document] = &page[..] else { return Err("a page of one has others".to_owned()) };
            let of_document = document["_etag"].as_str().unwrap_or_default().to_owned();
            let seconds = document["_ts"].as_u64().unwrap_or_default();
            documents.push(Moved { place, etag: of_document, seconds, number: 0 });
            etag = Some(next);
        }
    }
    documents.sort_by(|one, other| one.place.key().cmp(&other.place.key()));
    // The emulator orders by second first, and a second may begin while two writers are at it.
    if !documents.is_sorted_by_key(|one| one.seconds) {
        return Err(format!("range {range} {OUT_OF_ORDER}"));
    }
    Ok(Before { range, bounds, documents })
}

/// Notes which numbers the documents of merged ranges have now. Nobody may write meanwhile.
pub(crate) async fn after(
    service: &Service,
    database: &str,
    container: &str,
    into: u32,
    mut merged: Vec<Before>,
    fates: &mut Fates,
) -> Result<(), String> {
    let path = format!("/dbs/{database}/colls/{container}/docs");
    let headers = [(RANGE, into.to_string())];
    let found = service.changes(&path, &headers).await?;
    let (etag, documents) = found.unwrap_or_default();
    let total: usize = merged.iter().map(|before| before.documents.len()).sum();
    let last = Place::read(&etag).map_or(0, |place| place.lsn);
    // The pinned emulator gives 1, 2, 3 … in the order of its change feed.
    if documents.len() != total || last != total as u64 {
        return Err(format!(
            "{total} documents were merged, {} up to {last} found",
            documents.len()
        ));
    }
    let numbers: HashMap<&str, u64> = (1..)
        .zip(&documents)
        .filter_map(|(number, document)| Some((document["_etag"].as_str()?, number)))
        .collect();
    for before in &mut merged {
        for one in &mut before.documents {
            let number = numbers.get(one.etag.as_str());
            one.number = *number.ok_or("a document is gone after a merge")?;
        }
        if !before.documents.is_sorted_by_key(|one| one.number) {
            return Err("documents stand in another order after a merge".to_owned());
        }
    }
    fates.mix(into, &merged);
    for Before { range, bounds, documents } in merged {
        fates.fates.insert(range, Fate::Merged { into, bounds, documents });
    }
    Ok(())
}

/// Cuts a range of hashes.
fn slices((from, to): &(String, String)) -> Vec<(String, String)> {
    let hash = |text: &str| {
        let digits: String = format!("{text:0<32}").chars().take(32).collect();
        u128::from_str_radix(&digits, 16).map_or(HASHES, |hash| hash.min(HASHES))
    };
    let (first, end) = (hash(from), hash(to));
    let width = end.saturating_sub(first) / SLICES;
    if width == 0 {
        return vec![(from.clone(), to.clone())];
    }
    let mut ends: Vec<String> = vec![from.clone()];
    ends.extend((1..SLICES).map(|at| format!("{:032X}", first + at * width)));
    ends.push(to.clone());
    ends.windows(2).map(|two| (two[0].clone(), two[1].clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(lsn: u64, epk: &str, id: &str, range: Option<u32>) -> Place {
        Place { kind: "k".to_owned(), lsn, epk: epk.to_owned(), id: id.to_owned(), range }
    }

    fn moved(lsn: u64, epk: &str, number: u64) -> Moved {
        Moved { place: place(lsn, epk, "d", None), etag: String::new(), seconds: 0, number }
    }

    /// Ranges 0 and 1 became 2, which was split into 3 and 4; 4 and 5 became 6. Range 7 was split
    /// into 8 and 9, which became 10.
    fn fates() -> Fates {
        let ends = |from: &str, to: &str| (from.to_owned(), to.to_owned());
        let merged = |into, bounds, documents| Fate::Merged { into, bounds, documents };
        let fates = HashMap::from([
            (0, merged(2, ends("", "20"), vec![moved(5, "10", 1), moved(8, "11", 4)])),
            (1, merged(2, ends("20", "30"), vec![moved(2, "20", 2), moved(3, "28", 3)])),
            (2, Fate::Split(vec![(3, ends("", "28")), (4, ends("28", "30"))])),
            (4, merged(6, ends("28", "30"), vec![moved(3, "28", 9)])),
            (7, Fate::Split(vec![(8, ends("60", "68")), (9, ends("68", "70"))])),
            (8, merged(10, ends("60", "68"), vec![moved(1, "61", 1), moved(3, "62", 3)])),
            (9, merged(10, ends("68", "70"), vec![moved(2, "69", 2), moved(4, "6A", 4)])),
        ]);
        Fates { fates, mixed: HashMap::new() }
    }

    fn followed(mut at: Place, to: u32, scope: (&str, &str)) -> Option<(u64, String)> {
        fates().follow(&mut at, to, scope).ok().map(|()| (at.lsn, at.epk))
    }

    #[test]
    fn a_place_is_told_by_the_document_that_it_stands_after() {
        let in_first = ("", "20");
        for (lsn, number, epk) in
            [(4, 0, ""), (5, 1, "10"), (7, 1, "10"), (8, 4, "11"), (9, 4, "11")]
        {
            let found = followed(place(lsn, "11", "d", Some(0)), 2, in_first);
            assert_eq!(found, Some((number, epk.to_owned())), "{lsn}");
        }
        // Of two with one number, the first.
        let found = followed(place(8, "10", "d", Some(0)), 2, in_first);
        assert_eq!(found, Some((1, "10".to_owned())));
        // Over a split and another merge.
        let found = followed(place(3, "28", "d", Some(1)), 6, ("28", "30"));
        assert_eq!(found, Some((9, "28".to_owned())));
        let found = followed(place(2, "20", "d", Some(1)), 6, ("28", "30"));
        assert_eq!(found, Some((0, String::new())));
    }

    #[test]
    fn a_range_that_was_split_and_merged_again_is_read_on_whole_or_in_part() {
        for (lsn, scope, number) in [
            (2, ("60", "70"), 2),
            (3, ("60", "70"), 3),
            (3, ("60", "68"), 3),
            (3, ("68", "70"), 2),
            (0, ("60", "70"), 0),
        ] {
            let found = followed(place(lsn, "6F", "d", Some(7)), 10, scope);
            assert_eq!(found.map(|found| found.0), Some(number), "{lsn} in {scope:?}");
        }
    }

    #[test]
    fn a_place_of_a_part_is_none_of_the_whole() {
        assert_eq!(followed(place(5, "10", "d", Some(0)), 2, ("", "30")), None);
    }

    #[test]
    fn other_places_stay() {
        for range in [None, Some(2), Some(7)] {
            let found = followed(place(5, "10", "d", range), 2, ("", "30"));
            assert_eq!(found, Some((5, "10".to_owned())), "{range:?}");
        }
    }

    #[test]
    fn a_page_ends_between_batches_that_a_merge_has_mixed() {
        let before =
            |range, documents| Before { range, bounds: (String::new(), String::new()), documents };
        let one = vec![moved(1, "10", 1), moved(2, "10", 2), moved(2, "10", 4), moved(3, "10", 6)];
        let other = vec![moved(2, "20", 3), moved(2, "20", 5), moved(4, "20", 7)];
        let mut fates = Fates::default();
        fates.mix(2, &[before(0, one), before(1, other)]);
        fates.split(2, vec![(3, (String::new(), String::new()))]);
        for range in [2, 3] {
            let cuts = |lsn| fates.cuts(&place(lsn, "10", "d", Some(range)));
            assert_eq!((1..=7).filter(|lsn| cuts(*lsn)).collect::<Vec<u64>>(), [2, 3, 4]);
        }
        // Merged again: they stay together.
        let again = vec![moved(2, "10", 2), moved(3, "20", 5), moved(4, "10", 6)];
        fates.mix(9, &[before(3, again)]);
        let cuts = |lsn| fates.cuts(&place(lsn, "10", "d", Some(9)));
        assert_eq!((1..=7).filter(|lsn| cuts(*lsn)).collect::<Vec<u64>>(), [2, 3, 4, 5]);
    }

    #[test]
    fn slices_cover_a_range_without_a_gap() {
        for (from, to) in [("", "FF"), ("", "10"), ("2AAA", "2AAB"), ("20", "20")] {
            let cut = slices(&(from.to_owned(), to.to_owned()));
            assert_eq!(cut.first().map(|first| first.0.as_str()), Some(from));
            assert_eq!(cut.last().map(|last| last.1.as_str()), Some(to));
            assert!(cut.windows(2).all(|two| two[0].1 == two[1].0 && two[0].0 < two[0].1));
        }
    }

    #[test]
    fn an_etag_has_its_range_in_it() {
        let text = place(5, "10", "d", None).text();
        let tagged = tagged(&text, Some(3)).expect("a place");
        assert_eq!(Place::read(&tagged), Some(place(5, "10", "d", Some(3))));
        assert_eq!(super::tagged("\"5\"", Some(3)), None);
    }
}
