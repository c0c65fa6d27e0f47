use postrider::sqlite::{append, rusqlite::Transaction};

fn place_order(tx: Transaction<'_>) {
    tx.commit().unwrap();
    append(&tx, &[]).unwrap();
}

fn main() {}
