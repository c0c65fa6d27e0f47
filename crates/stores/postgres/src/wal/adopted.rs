//! The application's own table that an outbox may be.
//!
//! What lives here: what was said when it was adopted, and whether that fits what the log shows.
//! What does not: how it fits (`mapping.rs`), and rows (`mapped.rs`).
//! Invariant: rows of before a change of the table's columns are read by the mapping that fitted
//! them then; what no mapping fits stops the stream before it, and is told with its remedy.

use std::collections::{HashMap, HashSet};

use postrider_core::{Error, Result};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::mapped::Mapped;
use super::mapping::{Mapping, Misfit, Types};
use super::pgoutput::Column;
use crate::connections::{Connections, Param};
use crate::names::{Names, identifier, literal};

/// Reads the catalogue; locks nothing. The types are those whose cast to text is a function of its
/// own: all but boolean, "char", name, cidr, inet and character, whose are known. Last, whether the
/// view reads the table that now has the name: a catch-up reads the one, the stream the other.
const LOAD: &str = "WITH RECURSIVE beneath (oid, base) AS (
        SELECT t.oid, t.typbasetype FROM pg_type AS t WHERE t.typtype = 'd'
        UNION ALL
        SELECT b.oid, t.typbasetype FROM beneath AS b
        JOIN pg_type AS t ON t.oid = b.base AND t.typtype = 'd'),
    domain AS MATERIALIZED (SELECT b.oid, b.base FROM beneath AS b
        JOIN pg_type AS t ON t.oid = b.base AND t.typtype <> 'd')
    SELECT a.source, a.columns, a.mapping::text, a.earlier::text, a.xmin::text, f.identity::text,
        {schema}.log_table(a.outbox),
        ARRAY(SELECT d.oid FROM domain AS d ORDER BY d.oid),
        ARRAY(SELECT d.base FROM domain AS d ORDER BY d.oid),
        ARRAY(SELECT k.castsource FROM pg_cast AS k WHERE k.casttarget = 'text'::regtype
            AND k.castmethod = 'f' AND k.castsource NOT IN (16, 18, 19, 650, 869, 1042)
            UNION ALL SELECT 'xml'::regtype::oid),
        (SELECT bool_or(d.refobjid = {schema}.log_table(a.outbox)) FROM pg_class AS c
            JOIN pg_namespace AS n ON n.oid = c.relnamespace
            JOIN pg_rewrite AS r ON r.ev_class = c.oid
            JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                AND d.refclassid = 'pg_class'::regclass AND d.refobjid <> c.oid
            WHERE n.nspname = {schema_text} AND c.relname = a.outbox AND c.relkind = 'v')
    FROM {schema}.adopted AS a JOIN {schema}.feed AS f ON f.outbox = a.outbox
    WHERE a.outbox = {outbox_text}";

/// The columns that the log would show of table `$1`, through publication `$2`.
const COLUMNS: &str = "SELECT a.attname::text, a.atttypid FROM pg_attribute AS a
    WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
        AND (a.attgenerated = '' OR EXISTS (SELECT FROM pg_publication AS p
            WHERE p.pubname = $2 AND to_jsonb(p) ->> 'pubgencols' = a.attgenerated::text))
    ORDER BY a.attnum";

/// The columns of the view, without which nothing can be read from the table.
const VIEW: &str = "SELECT EXISTS (SELECT FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = {schema_text} AND c.relname = {outbox_text} AND c.relkind = 'v')";

/// An adopted table.
#[derive(Debug)]
pub(super) struct Adopted {
    schema: String,
    outbox: String,
    /// Quoted, and with its schema.
    source: String,
    /// The table's number; that of messages about it.
    pub(super) oid: u32,
    /// Whether its rows have transaction ids and numbers, so that they can be told apart.
    pub(super) columns: bool,
    identity: String,
    /// As the present mapping was written.
    written: String,
    /// The present one, and those of before.
    mappings: Vec<Mapping>,
    types: Types,
    /// Another one after each change.
    pub(super) version: String,
}

/// What the outbox was adopted from; nothing for one that is Postrider's own.
///
/// # Errors
/// `Transient` while the table is not there.
pub(super) async fn load(connections: &Connections, names: &Names) -> Result<Option<Adopted>> {
    let rows = connections.query("look at an adopted table", &names.fill(LOAD), &[]).await?;
    rows.first().map(|row| Adopted::of(row, names)).transpose()
}

impl Adopted {
    /// Whether its rows stay until every consumer has had them: Postrider deletes them, as the
    /// mapping says. Others' rows may be gone at once, and are in the log alone.
    pub(super) fn keeps_rows(&self) -> bool {
        let written = serde_json::from_str::<serde_json::Value>(&self.written);
        written.is_ok_and(|mapping| mapping["delete"] == serde_json::Value::Bool(true))
    }

    fn of(row: &Row, names: &Names) -> Result<Self> {
        let (source, written): (String, String) = (row.get(0), row.get(2));
        let oid = row.get::<_, Option<u32>>(6).ok_or_else(|| gone(names.outbox(), &source))?;
        if row.get::<_, Option<bool>>(10) == Some(false) {
            return Err(replaced(names.outbox(), &source));
        }
        let earlier: Vec<serde_json::Value> = serde_json::from_str(row.get(3))
            .map_err(|error| Error::corrupt("the earlier mappings").with_source(error))?;
        let mut mappings = vec![Mapping::parse(&written)?];
        for mapping in earlier {
            mappings.push(Mapping::parse(&mapping.to_string())?);
        }
        let domains: HashMap<_, _> =
            row.get::<_, Vec<u32>>(7).into_iter().zip(row.get::<_, Vec<u32>>(8)).collect();
        let unlike: HashSet<_> = row.get::<_, Vec<u32>>(9).into_iter().collect();
        Ok(Self {
            schema: names.schema().to_owned(),
            outbox: names.outbox().to_owned(),
            source,
            oid,
            columns: row.get(1),
            identity: row.get(5),
            written,
            mappings,
            types: Types { domains, unlike },
            version: row.get(4),
        })
    }

    /// The newest mapping that fits these columns, on them.
    ///
    /// # Errors
    /// `Transient` with the remedy when none does: it goes on once one does.
    pub(super) fn fit(&self, columns: &[Column]) -> Result<Mapped> {
        let identity = self.identity.clone();
        let mut fits = self.mappings.iter().map(|mapping| mapping.fit(columns, &self.types));
        let first = match fits.next() {
            Some(Ok(fitted)) => return Ok(Mapped { fitted, identity }),
            Some(Err(misfit)) => misfit,
            None => return Err(Error::corrupt("an adopted table has no mapping")),
        };
        match fits.find_map(Result::ok) {
            Some(fitted) => Ok(Mapped { fitted, identity }),
            None => Err(Error::transient(self.misfit(&first, columns))),
        }
    }

    /// Looks whether the present mapping fits the table as it is, and whether the view is there.
    ///
    /// # Errors
    /// `Permanent` with the remedy.
    pub(super) async fn check(
        &self,
        connections: &Connections,
        names: &Names,
        publication: &str,
    ) -> Result<()> {
        let params: [Param<'_>; 2] = [(&self.oid, Type::OID), (&publication, Type::TEXT)];
        let rows = connections.query("look at an adopted table", COLUMNS, &params).await?;
        let column =
            |row: &Row| Column { name: row.get(0), type_id: row.get(1), modifier: -1, key: false };
        let columns: Vec<_> = rows.iter().map(column).collect();
        let fit = self.mappings.first().map(|mapping| mapping.fit(&columns, &self.types));
        if let Some(Err(misfit)) = fit {
            return Err(Error::permanent(self.misfit(&misfit, &columns)));
        }
        let rows = connections.query("look at an adopted table", &names.fill(VIEW), &[]).await?;
        match rows.first().is_some_and(|row| row.get(0)) {
            true => Ok(()),
            false => Err(Error::permanent(format!(
                "the view of outbox {:?} on {} was dropped; make it again: {}",
                self.outbox,
                self.source,
                self.adopt(&self.written)
            ))),
        }
    }

    /// The statement that gives the table another mapping.
    fn adopt(&self, mapping: &str) -> String {
        format!(
            "SELECT {}.adopt_table({}, {}, {}, {})",
            identifier(&self.schema),
            literal(&self.source),
            literal(mapping),
            self.columns,
            literal(&self.outbox)
        )
    }

    fn misfit(&self, misfit: &Misfit, columns: &[Column]) -> String {
        let Self { source, outbox, written, .. } = self;
        let names: Vec<_> = columns.iter().map(|column| identifier(&column.name)).collect();
        let (field, what) = match misfit {
            Misfit::Unlike(field, column) => {
                return format!(
                    "column {} of {source}, which the mapping of outbox {outbox:?} takes as \
                     {field:?}, is of a type whose text the log does not have; map a column of \
                     another type, or read the table as a feed (kind = \"postgres-feed\")",
                    identifier(column)
                );
            }
            Misfit::Missing(field, Some(column)) => (
                field,
                format!(
                    "without its column {}, which the mapping of outbox {outbox:?} takes as \
                     {field:?}",
                    identifier(column)
                ),
            ),
            Misfit::Missing(field, None) => {
                (field, format!("without a column that outbox {outbox:?} could take as {field:?}"))
            }
        };
        let mut mapping: serde_json::Value = serde_json::from_str(written).unwrap_or_default();
        if let Some(object) = mapping.as_object_mut().filter(|_| field != "headers") {
            object.insert(field.clone(), "a_column".into());
        }
        format!(
            "the log shows {source} {what} (renamed or dropped, or generated: then it is not in \
             the log); name one that it has, {}: {}; what was written before is read by the \
             mapping of before",
            names.join(", "),
            self.adopt(&mapping.to_string())
        )
    }
}

/// Another table has the name of the one that was adopted, of which the view still is.
fn replaced(outbox: &str, source: &str) -> Error {
    Error::transient(format!(
        "another table is called {source} now than the one that was adopted as outbox {outbox:?}: \
         give that one its name back until all of it is delivered, then replace it and call \
         adopt_table again in the same transaction"
    ))
}

/// The table that the outbox was adopted from is not there.
pub(super) fn gone(outbox: &str, source: &str) -> Error {
    Error::transient(format!(
        "there is no table {source}, which was adopted as outbox {outbox:?}; give it its name \
         back, or call release_table"
    ))
}
