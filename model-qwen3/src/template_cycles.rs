//! Refuses chat templates that could store a namespace in a namespace. A namespace that holds itself has no end: to print, compare
//! or sort it overflows the stack, which nothing can catch. The template library has no other values that can be changed, so
//! without such an assignment no value holds itself.
//!
//! The check reads the syntax tree. It ignores the order in which a template runs, and finds for each name what its values can be:
//! only values without a namespace, namespaces themselves, or also values that may hold a namespace. An attribute of a namespace
//! never holds a namespace, because the check refuses such an assignment.

use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, Macro, Stmt};
use std::collections::{HashMap, HashSet};

/// What a value is at most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum ValueKind {
    /// No namespace, and nothing that holds one.
    #[default]
    Clean,
    /// A namespace.
    Space,
    /// Something that may hold a namespace, or be one.
    Holder,
}

impl ValueKind {
    /// What holds values of this kind.
    fn held(self) -> Self {
        if self == Self::Clean { self } else { Self::Holder }
    }
}

/// The line of an assignment that may store a namespace in a namespace.
pub(crate) fn line_of_cycle(template: &Stmt<'_>) -> Option<u32> {
    let mut names = Names::default();
    loop {
        let before = names.size();
        names.found = None;
        names.statement(template);
        if names.size() == before {
            return names.found;
        }
    }
}

/// What is known of the names of a template.
#[derive(Default)]
struct Names<'a> {
    kinds: HashMap<&'a str, ValueKind>,
    /// Macros, which return text.
    macros: HashSet<&'a str>,
    /// Whether a call hands a namespace over. Then parameters and the variables of loops that call themselves may be one.
    handed_over: bool,
    /// The first line with a forbidden assignment.
    found: Option<u32>,
}

impl<'a> Names<'a> {
    /// Grows with all that is learned.
    fn size(&self) -> usize {
        self.kinds.values().map(|kind| *kind as usize).sum::<usize>()
            + self.macros.len()
            + usize::from(self.handed_over)
    }

    fn statements(&mut self, all: &[Stmt<'a>]) {
        all.iter().for_each(|statement| self.statement(statement));
    }

    fn statement(&mut self, statement: &Stmt<'a>) {
        match statement {
            Stmt::Template(s) => self.statements(&s.children),
            Stmt::EmitExpr(s) => {
                self.kind(&s.expr);
            }
            Stmt::EmitRaw(_) | Stmt::Extends(_) | Stmt::Include(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
            Stmt::ForLoop(s) => {
                let kind = if s.recursive && self.handed_over { ValueKind::Holder } else { self.kind(&s.iter).held() };
                self.assign(&s.target, kind);
                if let Some(filter) = &s.filter_expr {
                    self.kind(filter);
                }
                self.statements(&s.body);
                self.statements(&s.else_body);
            }
            Stmt::IfCond(s) => {
                self.kind(&s.expr);
                self.statements(&s.true_body);
                self.statements(&s.false_body);
            }
            Stmt::WithBlock(s) => {
                for (target, value) in &s.assignments {
                    let kind = self.kind(value);
                    self.assign(target, kind);
                }
                self.statements(&s.body);
            }
            Stmt::Set(s) => {
                let kind = self.kind(&s.expr);
                self.assign(&s.target, kind);
            }
            Stmt::SetBlock(s) => {
                // A block gives text, and a filter may give anything that it is given.
                let kind = s.filter.as_ref().map_or(ValueKind::Clean, |filter| self.kind(filter));
                self.assign(&s.target, kind);
                self.statements(&s.body);
            }
            Stmt::AutoEscape(s) => self.statements(&s.body),
            Stmt::FilterBlock(s) => {
                self.kind(&s.filter);
                self.statements(&s.body);
            }
            Stmt::Block(s) => self.statements(&s.body),
            Stmt::Import(s) => self.assign(&s.name, ValueKind::Holder),
            Stmt::FromImport(s) => {
                for (name, alias) in &s.names {
                    self.assign(alias.as_ref().unwrap_or(name), ValueKind::Holder);
                }
            }
            Stmt::Macro(s) => {
                self.macros.insert(s.name);
                self.parameters(s);
            }
            Stmt::CallBlock(s) => {
                self.call(&s.call);
                self.parameters(&s.macro_decl);
            }
            Stmt::Do(s) => {
                self.call(&s.call);
            }
        }
    }

    fn parameters(&mut self, declared: &Macro<'a>) {
        let given = if self.handed_over { ValueKind::Holder } else { ValueKind::Clean };
        let default = declared.defaults.iter().map(|value| self.kind(value)).max().unwrap_or_default();
        declared.args.iter().for_each(|parameter| self.assign(parameter, given.max(default)));
        self.statements(&declared.body);
    }

    fn assign(&mut self, target: &Expr<'a>, kind: ValueKind) {
        match target {
            Expr::Var(name) => {
                let known = self.kinds.entry(name.id).or_default();
                *known = kind.max(*known);
            }
            Expr::List(all) => all.items.iter().for_each(|item| self.assign(item, kind.held())),
            Expr::Tuple(all) => all.items.iter().for_each(|item| self.assign(item, kind.held())),
            other if kind != ValueKind::Clean => self.forbid(other),
            _ => {}
        }
    }

    fn forbid(&mut self, place: &Expr<'a>) {
        self.found.get_or_insert(u32::from(place.span().start_line));
    }

    fn kind(&mut self, value: &Expr<'a>) -> ValueKind {
        match value {
            Expr::Const(_) => ValueKind::Clean,
            Expr::Var(name) => match self.kinds.get(name.id) {
                Some(kind) => *kind,
                // Another name for the function that makes namespaces.
                None if name.id == NAMESPACE => ValueKind::Holder,
                None => ValueKind::Clean,
            },
            Expr::GetAttr(get) => self.part(&get.expr),
            Expr::GetItem(get) => {
                self.kind(&get.subscript_expr);
                self.part(&get.expr)
            }
            Expr::Slice(slice) => {
                for at in [&slice.start, &slice.stop, &slice.step].into_iter().flatten() {
                    self.kind(at);
                }
                self.kind(&slice.expr).held()
            }
            Expr::UnaryOp(not) => {
                self.kind(&not.expr);
                ValueKind::Clean
            }
            Expr::BinOp(pair) => {
                let both = self.kind(&pair.left).max(self.kind(&pair.right));
                match pair.op {
                    BinOpKind::ScAnd | BinOpKind::ScOr => both,
                    // Lists are added and repeated.
                    BinOpKind::Add | BinOpKind::Mul => both.held(),
                    _ => ValueKind::Clean,
                }
            }
            Expr::Compare(compared) => {
                self.kind(&compared.expr);
                for op in &compared.ops {
                    self.kind(&op.expr);
                }
                ValueKind::Clean
            }
            Expr::IfExpr(choice) => {
                self.kind(&choice.test_expr);
                let otherwise = choice.false_expr.as_ref().map(|value| self.kind(value));
                self.kind(&choice.true_expr).max(otherwise.unwrap_or_default())
            }
            Expr::Filter(filter) => {
                let given = filter.expr.as_ref().map(|value| self.kind(value)).unwrap_or_default();
                given.max(self.arguments(&filter.args)).held()
            }
            Expr::Test(test) => {
                self.kind(&test.expr);
                self.arguments(&test.args);
                ValueKind::Clean
            }
            Expr::Call(call) => self.call(call),
            Expr::List(all) => self.all(&all.items),
            Expr::Tuple(all) => self.all(&all.items),
            Expr::Map(all) => self.all(&all.keys).max(self.all(&all.values)),
        }
    }

    /// The kind of an attribute or an item of `whole`.
    fn part(&mut self, whole: &Expr<'a>) -> ValueKind {
        if self.kind(whole) == ValueKind::Holder { ValueKind::Holder } else { ValueKind::Clean }
    }

    /// The kind of what holds these values.
    fn all(&mut self, values: &[Expr<'a>]) -> ValueKind {
        values.iter().map(|value| self.kind(value)).max().unwrap_or_default().held()
    }

    fn call(&mut self, call: &Call<'a>) -> ValueKind {
        let arguments = self.arguments(&call.args);
        let called = match &call.expr {
            Expr::Var(name) if self.kinds.get(name.id).is_none_or(|kind| *kind == ValueKind::Clean) => {
                if name.id == NAMESPACE {
                    if arguments != ValueKind::Clean {
                        self.forbid(&call.expr);
                    }
                    return ValueKind::Space;
                }
                self.handed_over |= arguments != ValueKind::Clean;
                return if self.macros.contains(name.id) { ValueKind::Clean } else { arguments };
            }
            // Methods.
            Expr::GetAttr(get) => self.kind(&get.expr),
            other => self.kind(other),
        };
        self.handed_over |= arguments != ValueKind::Clean;
        called.max(arguments).held()
    }

    fn arguments(&mut self, all: &[CallArg<'a>]) -> ValueKind {
        let kinds = all.iter().map(|argument| match argument {
            CallArg::Pos(value) | CallArg::Kwarg(_, value) | CallArg::PosSplat(value) | CallArg::KwargSplat(value) => {
                self.kind(value)
            }
        });
        kinds.max().unwrap_or_default().held()
    }
}

/// The function that makes namespaces.
const NAMESPACE: &str = "namespace";

#[cfg(test)]
mod tests {
    use super::line_of_cycle;
    use minijinja::machinery::parse;

    fn line(template: &str) -> Option<u32> {
        line_of_cycle(&parse(template, "chat", Default::default()).unwrap())
    }

    #[test]
    fn a_namespace_may_not_hold_a_namespace() {
        const NS: &str = "{% set ns = namespace(a=1) %}\n";
        for cycle in [
            "{% set ns.a = ns %}",
            "{% set ns.a = [ns] %}",
            "{% set ns.a = {'x': ns} %}",
            "{% set ns.a = (1, ns) %}",
            "{% set other = ns %}{% set ns.a = other %}",
            "{% set ns.a = late %}{% set late = [ns] %}",
            "{% set l = [ns] %}{% set ns.a = l[0] %}",
            "{% set l = [ns] %}{% set ns.a = l | first %}",
            "{% set l = {'x': ns} %}{% set ns.a = l.x %}",
            "{% for x in [ns] %}{% set ns.a = x %}{% endfor %}",
            "{% for x, y in [(1, ns)] %}{% set ns.a = y %}{% endfor %}",
            "{% with x = ns %}{% set x.a = ns %}{% endwith %}",
            "{% macro m(x) %}{% set x.a = x %}{% endmacro %}{{ m(ns) }}",
            "{% for x in [] recursive %}{% set ns.a = x %}{{ loop([ns]) }}{% endfor %}",
            "{% set ns.a = ns if true else 1 %}",
            "{% set ns.a = false or ns %}",
            "{% set ns.a = [1] + [ns] %}",
            "{% set ns.a = namespace(b=ns) %}",
            "{% set ns.a = dict(b=ns) %}",
            "{% set make = namespace %}{% set ns.a = make() %}",
            "{% set c = cycler(ns) %}{% set ns.a = c.next() %}",
        ] {
            assert_eq!(line(&format!("{NS}{cycle}")), Some(2), "{cycle}");
        }
    }

    #[test]
    fn what_chat_templates_do_is_allowed() {
        for template in [
            "{% set ns = namespace(last=messages|length - 1, found=false) %}{% for m in messages[::-1] %}{% set i = ns.last - loop.index0 %}\
             {% if m.role == 'user' and not ns.found %}{% set ns.last = i %}{% set ns.found = true %}{% endif %}{% endfor %}",
            "{% set ns = namespace() %}{% set ns.a = [1] %}{% set ns.a = ns.a + [2] %}{% set ns.b = ns.a[0] %}{{ ns.a|join }}",
            "{% macro m(x) %}{{ x }}{% endmacro %}{% set ns = namespace() %}{% set ns.text = m('a') ~ ns.text %}",
            "{% set ns = namespace() %}{% for t in tools %}{% set ns.tool = t %}{% endfor %}{{ ns.tool.name }}",
        ] {
            assert_eq!(line(template), None, "{template}");
        }
    }
}
