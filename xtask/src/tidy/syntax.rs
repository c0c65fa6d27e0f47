//! Rules that need a file's syntax: how long its functions are, and how its items are named.
//!
//! What lives here: one walk over the syntax tree. What does not: the banned words (`names.rs`).
//! Invariant: test modules are walked for names only; a test may be as long as its story.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::Finding;
use super::names::banned_word;
use crate::workspace::TextFile;

const MAX_FUNCTION_LINES: usize = 70;

/// Functions are short, and no item, field, variable or parameter has a name that says nothing.
pub(super) fn functions_and_names(file: &TextFile) -> Vec<Finding> {
    if !file.is_rust() || file.path.contains("/misuse/") {
        return Vec::new();
    }
    let tree = match syn::parse_file(&file.text) {
        Ok(tree) => tree,
        Err(error) => {
            let line = error.span().start().line;
            return vec![Finding::new(&file.path, line, "syntax", error.to_string())];
        }
    };
    let mut walk = Walk { path: &file.path, in_tests: file.is_test(), findings: Vec::new() };
    walk.visit_file(&tree);
    walk.findings
}

struct Walk<'a> {
    path: &'a str,
    in_tests: bool,
    findings: Vec<Finding>,
}

impl Walk<'_> {
    fn function(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let first = signature.span().start().line;
        let lines = body.span().end().line + 1 - first;
        if lines > MAX_FUNCTION_LINES && !self.in_tests {
            let remedy = format!(
                "{} has {lines} lines; {MAX_FUNCTION_LINES} are allowed: name its parts",
                signature.ident
            );
            self.findings.push(Finding::new(self.path, first, "function length", remedy));
        }
        // A test's name is a sentence; any word may stand in it.
        if !self.in_tests {
            self.name(&signature.ident);
        }
    }

    fn name(&mut self, name: &proc_macro2::Ident) {
        if let Some(word) = banned_word(&name.to_string()) {
            let remedy = format!("{name}: {word} says nothing; name it by what it does");
            let line = name.span().start().line;
            self.findings.push(Finding::new(self.path, line, "name", remedy));
        }
    }
}

fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

impl<'ast> Visit<'ast> for Walk<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.name(&item.ident);
        let outside = self.in_tests;
        self.in_tests |= is_test_only(&item.attrs);
        visit::visit_item_mod(self, item);
        self.in_tests = outside;
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        match &item.default {
            Some(body) => self.function(&item.sig, body),
            None => self.name(&item.sig.ident),
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.name(&item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.name(&item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.name(&item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.name(&item.ident);
        visit::visit_item_type(self, item);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.name(&item.ident);
        visit::visit_item_const(self, item);
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.name(&item.ident);
        visit::visit_item_static(self, item);
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.name(&variant.ident);
        visit::visit_variant(self, variant);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if let Some(name) = &field.ident {
            self.name(name);
        }
        visit::visit_field(self, field);
    }

    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        self.name(&pattern.ident);
        visit::visit_pat_ident(self, pattern);
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn rules(text: &str) -> Vec<(usize, &'static str)> {
        let found = functions_and_names(&sample("crates/core/src/a.rs", text));
        found.iter().map(|finding| (finding.line, finding.rule)).collect()
    }

    fn function_of(lines: usize) -> String {
        format!("fn long() {{\n{}}}\n", "    step();\n".repeat(lines - 2))
    }

    #[test]
    fn a_function_of_71_lines_is_too_long_and_70_fit() {
        assert_eq!(rules(&function_of(71)), [(1, "function length")]);
        assert_eq!(rules(&function_of(70)), []);
        let method = format!("struct A;\nimpl A {{\n{}}}\n", function_of(71));
        assert_eq!(rules(&method), [(3, "function length")]);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", function_of(200));
        assert_eq!(rules(&tests), []);
    }

    #[test]
    fn braces_in_texts_do_not_confuse_the_count() {
        assert_eq!(rules("fn a() { let _ = (\"}\", '{', r#\"}}}\"#); }"), []);
    }

    #[test]
    fn names_that_say_nothing_are_found_where_they_are_given_and_not_where_used() {
        assert_eq!(rules("struct LeaseManager;"), [(1, "name")]);
        assert_eq!(rules("fn a(\n    helper: u8,\n) {}"), [(2, "name")]);
        assert_eq!(rules("fn a() {\n    let utils = 1;\n}"), [(2, "name")]);
        assert_eq!(rules("enum A { Misc }"), [(1, "name")]);
        assert_eq!(rules("#[cfg(test)]\nmod tests { fn the_common_case() {} }"), []);
        assert_eq!(rules("use tower::util::ServiceExt;\nfn a() { foreign::helper(); }"), []);
    }

    #[test]
    fn what_does_not_parse_is_told_with_its_line() {
        assert_eq!(rules("fn a() {}\nfn b( {}\n"), [(2, "syntax")]);
    }
}
