"""A graph of LangGraph: one node drafts an answer, another one reviews it."""

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from rollout_workers import openai_agent


@openai_agent(tasks=[("1+1=", "2"), ("2+3=", "5")], reward=lambda task, answer: float(answer == task.answer))
async def agent(base_url, api_key, task):
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)

    async def draft(state: MessagesState):
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def review(state: MessagesState):
        asked = ("user", "Check it, and answer again.")
        return {"messages": [asked, await model.ainvoke([*state["messages"], asked])]}

    graph = StateGraph(MessagesState)
    graph.add_node(draft)
    graph.add_node(review)
    graph.add_edge(START, "draft")
    graph.add_edge("draft", "review")
    graph.add_edge("review", END)
    done = await graph.compile().ainvoke({"messages": [("user", task.prompt)]})
    return done["messages"][-1].text
