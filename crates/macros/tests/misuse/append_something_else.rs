use postrider::sqlite::{append, rusqlite::Transaction};

fn place_order(tx: &Transaction<'_>) {
    append(tx, &["OrderPlaced"]).unwrap();
}

fn main() {}
